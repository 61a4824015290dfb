"""Tokenising documents with GPT-2's vocabulary: ours on every core against one-thread tiktoken and `tokenizers`.

`python -m benchmarks.tokenize_speed`. The text is every other module of the standard library. GPT-2's own files need tiktoken's
cache or a network; without them, all three run the same bpe tokenizer, trained here. `tokenizers` has the threads
that it takes by itself.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.harness import as_row, interleave, store
from data.build import cores
from data.foreign_tokenizer import ALPHABET
from data.prepare import prepare
from data.source import DataConfig
from data.stdlib import module_files
from data.tokenizer import TiktokenTokenizer, TokenizerConfig, build_tokenizer


def vocabulary(texts: list[str]) -> TiktokenTokenizer:
    try:
        tokenizer = build_tokenizer(TokenizerConfig("gpt2"), list)
    except ValueError as error:
        print(f"{error}: comparing with bpe instead")
        tokenizer = build_tokenizer(TokenizerConfig("bpe", 32000), lambda: texts)
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


def in_tokenizers(ours: TiktokenTokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary for the `tokenizers` library: a merge is the pair that a token was made of."""
    spell = {byte: character for character, byte in ALPHABET.items()}
    names = {token: "".join(spell[byte] for byte in token) for token in ours.ranks}
    merges = []
    for token in sorted((token for token in ours.ranks if len(token) > 1), key=ours.ranks.__getitem__):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            ranks = [ours.ranks.get(a + b, len(names)) for a, b in zip(parts, parts[1:], strict=False)]
            at = ranks.index(min(ranks))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((names[parts[0]], names[parts[1]]))
    theirs = tokenizers.Tokenizer(models.BPE({names[token]: rank for token, rank in ours.ranks.items()}, merges))
    split = pre_tokenizers.Split(tokenizers.Regex(ours.pattern), "isolated")
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    theirs.pre_tokenizer = gpt2 if ours.name == "gpt2" else own
    theirs.decoder = decoders.ByteLevel()
    return theirs


def main(turns: int = 15) -> None:
    texts = [text for path in module_files() if (text := path.read_text())][::2]
    n_bytes = sum(len(text.encode()) for text in texts)
    ours = vocabulary(texts)
    theirs = in_tokenizers(ours)
    pool = ThreadPoolExecutor(cores())
    expected = [ours.encoding.encode_ordinary(text) for text in texts]
    assert [ids.tolist() for ids in ours.encode_batch(texts, pool)] == expected
    assert [one.ids for one in theirs.encode_batch_fast(texts)] == expected
    contestants = {
        "tiktoken, one thread": lambda: [ours.encoding.encode_ordinary(text) for text in texts],
        "tokenizers": lambda: theirs.encode_batch_fast(texts),
        "tokenizers, one text at a time": lambda: [theirs.encode(text) for text in texts],
        "sprout": lambda: ours.encode_batch(texts, pool),
    }
    timings = interleave(contestants, turns)
    row = as_row({"vocabulary": ours.name, "bytes": n_bytes, "cores": cores()}, timings, "tiktoken, one thread")
    row["MB/s"] = {name: round(n_bytes / 1e6 / timing.median, 2) for name, timing in timings.items()}
    row["times as fast as tokenizers"] = round(timings["tokenizers"].median / timings["sprout"].median, 2)
    row["seconds to prepare the whole library"] = round(preparation(ours), 2)
    print(json.dumps(row, indent=1))
    store("tokenize_speed", [row])


def preparation(tokenizer: TiktokenTokenizer) -> float:
    """Seconds from modules to token files on the disk."""
    with TemporaryDirectory() as cache:
        began = time.perf_counter()
        prepare(DataConfig(cache_dir=cache), tokenizer, 1, lambda line: None)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
