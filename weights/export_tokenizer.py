"""Our tokenizers as files that `tokenizers` and transformers' AutoTokenizer read: byte-level BPE that gives the same ids."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from data.foreign_tokenizer import ALPHABET
from data.tokenizer import END_OF_TEXT, TiktokenTokenizer

LETTERS = {byte: letter for letter, byte in ALPHABET.items()}


def save_tokenizer(tokenizer: TiktokenTokenizer, folder: Path, context_length: int) -> None:
    """tokenizer.json and tokenizer_config.json.

    As in our own tokenizers, text that spells a special token is text (split_special_tokens); transformers has
    `tokenizer(text, split_special_tokens=False)` for the opposite.
    """
    theirs = as_theirs(tokenizer.ranks, tokenizer.special, tokenizer.pattern)
    (folder / "tokenizer.json").write_text(theirs.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def as_theirs(ranks: dict[bytes, int], special: dict[str, int], pattern: str) -> Tokenizer:
    merges = [pair for token, rank in ranks.items() if len(pair := parts(token, ranks, rank)) == 2]
    vocabulary = {letters(token): rank for token, rank in ranks.items()} | special
    # A piece that is a token is that token, even one that no merges lead to: tiktoken's rule.
    odd = len(merges) + 256 < len(ranks)
    theirs = Tokenizer(models.BPE(vocabulary, [(letters(a), letters(b)) for a, b in merges], ignore_merges=odd))
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if merges:  # else there is nothing to keep apart
        # Their regex engine reads x{1,3}+ as (x{1,3})+; tiktoken's as one to three, with no way back.
        pattern = re.sub(r"(\\p\{\w+\})(\{\d+,\d+\})\+", r"(?>\1\2)", pattern)
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(steps)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return theirs


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
