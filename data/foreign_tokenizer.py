"""The tokenizer.json of a Hugging Face model, run by the `tokenizers` library: its ids are the model's own.

Texts are encoded whole, however large: only the model's makers know where their text may be cut.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data.tokenizer import Tokenizer, well_formed

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
# How byte-level tokenizers (GPT-2's and all that followed) spell bytes as characters.
ALPHABET = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}
BLANK = "\u2581"  # how sentencepiece spells a blank


class ForeignTokenizer(Tokenizer):
    name = "tokenizer.json"

    def __init__(self, folder: Path) -> None:
        self.json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self.settings = read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
        self.tokenizer = tokenizers.Tokenizer.from_str(self.json)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.n_vocab = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.added = {i: token.content for i, token in self.tokenizer.get_added_tokens_decoder().items()}
        self.ends = self._find_ends(folder)
        self.end_of_text = self.ends[0]
        whole = self.tokenizer.encode("a").ids
        self.prefix = whole[: whole.index(self.tokenizer.encode("a", add_special_tokens=False).ids[0])]
        decoder = json.loads(self.json).get("decoder") or {}
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
        self.byte_level = "ByteLevel" in steps
        self.byte_fallback = "ByteFallback" in steps
        metaspace = steps.get("Metaspace", {})
        self.strips = "Strip" in steps or metaspace.get("prepend_scheme", "never") != "never"  # a leading blank
        if not self.byte_level and not metaspace and steps.get("Replace", {}).get("content") != " ":
            raise ValueError(
                f"tokenizer.json has a decoder of {', '.join(steps) or 'no'} steps: only byte-level and "
                "sentencepiece tokenizers are understood"
            )

    def spelled(self) -> str:
        return self.json

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        self.tokenizer.encode_special_tokens = not special
        return self.tokenizer.encode(well_formed(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], pool: ThreadPoolExecutor) -> list[np.ndarray]:
        """`tokenizers` has threads of its own instead, as many as RAYON_NUM_THREADS says."""
        self.tokenizer.encode_special_tokens = True
        encoded = self.tokenizer.encode_batch_fast(list(map(well_formed, texts)), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token id {token} is outside the {self.n_vocab} ids of {self.name}")
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None:
            return "\ufffd".encode()
        if token in self.added:
            return self.added[token].encode()
        if self.byte_level and all(c in ALPHABET for c in spelled):
            return bytes(ALPHABET[c] for c in spelled)
        if self.byte_fallback and len(spelled) == 6 and spelled.startswith("<0x"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace(BLANK, " ").encode()

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        text = super().decode_bytes(ids)
        starts = self.strips and text.startswith(b" ") and int(ids[0]) not in self.added
        return text[1:] if starts else text

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.json, encoding="utf-8")
        settings = {**self.settings, "eos_token": self.tokenizer.id_to_token(self.end_of_text)}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
        if len(self.ends) > 1:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": self.ends}))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def named(self, key: str) -> int | None:
        """The id of the token that tokenizer_config.json calls so (eos_token, bos_token, ...), if it does."""
        token = self.settings.get(key) or ""
        return self.tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)

    def _find_ends(self, folder: Path) -> list[int]:
        named = self.named("eos_token")
        given = [read_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
        others = next((ids for ids in given if ids is not None), None)
        ends = [token for token in [named, *(others if isinstance(others, list) else [others])] if token is not None]
        if not ends:
            raise ValueError(
                f"{folder} names no end-of-text token: give eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json or config.json"
            )
        return list(dict.fromkeys(ends))


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
