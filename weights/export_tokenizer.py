"""Our tokenizers as files that `tokenizers` and transformers' AutoTokenizer read: byte-level BPE that gives the same ids."""

import json
import re
from pathlib import Path
from typing import Any

from data.foreign_tokenizer import ALPHABET
from data.tokenizer import END_OF_TEXT, TiktokenTokenizer

LETTERS = {byte: letter for letter, byte in ALPHABET.items()}


def save_tokenizer(tokenizer: TiktokenTokenizer, folder: Path, context_length: int) -> None:
    """tokenizer.json and tokenizer_config.json.

    As in our own tokenizers, text that spells a special token is text (split_special_tokens); transformers has
    `tokenizer(text, split_special_tokens=False)` for the opposite.
    """
    described = tokenizer_json(tokenizer.ranks, tokenizer.special, tokenizer.pattern)
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokenizer_json(ranks: dict[bytes, int], special: dict[str, int], pattern: str) -> dict[str, Any]:
    merges = [pair for token, rank in ranks.items() if len(pair := parts(token, ranks, rank)) == 2]
    split = {"type": "Split", "pattern": {"Regex": in_onigurumas_words(pattern)}, "behavior": "Isolated", "invert": False}
    bytes_to_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    as_text = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **as_text} for text, token in special.items()],
        "normalizer": None,
        # Where nothing is merged there is nothing to keep apart.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_to_letters] if merges else [bytes_to_letters]},
        "post_processor": None,
        "decoder": bytes_to_letters,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that is a token is that token, even one that no merges lead to: tiktoken's rule.
            "ignore_merges": len(merges) + 256 < len(ranks),
            "vocab": {letters(token): rank for token, rank in ranks.items()} | special,
            "merges": [[letters(a), letters(b)] for a, b in merges],
        },
    }


def letters(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)


def parts(token: bytes, ranks: dict[bytes, int], rank: int) -> list[bytes]:
    """What the tokens below `rank` make of this one. tiktoken keeps the results of merges, `tokenizers` the pairs merged."""
    found = [token[i : i + 1] for i in range(len(token))]
    while len(found) > 1:
        best, i = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(found, found[1:], strict=False)))
        if best >= rank:
            break
        found[i : i + 2] = [found[i] + found[i + 1]]
    return found


def in_onigurumas_words(pattern: str) -> str:
    """The regex engine of `tokenizers` reads x{1,3}+ as (x{1,3})+; tiktoken's as one to three, with no way back."""
    return re.sub(r"(\\p\{\w+\})(\{\d+,\d+\})\+", r"(?>\1\2)", pattern)
