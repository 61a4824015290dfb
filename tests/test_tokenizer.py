import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import data.tokenizer
from data.foreign_tokenizer import ForeignTokenizer
from data.stdlib import module_files
from data.text_stream import TextStream
from data.tokenizer import BPE_PATTERN, TiktokenTokenizer, TokenizerConfig, build_tokenizer, load_tokenizer, pieces

TEXTS = [text for path in module_files()[:50] if (text := path.read_text())][:40]
BYTES = build_tokenizer(TokenizerConfig("bytes"), list)
BPE = build_tokenizer(TokenizerConfig("bpe", 1000), lambda: TEXTS)
OURS = [BYTES, BPE]
ODD = st.lists(st.sampled_from([" ", "\r\n", "\t", "a", "Z9", "'s", "_", "<|endoftext|>", "é", "你好", "\u2029", "\0", "\ufeff"]))
POOL = ThreadPoolExecutor(2)


def name_of(tokenizer):
    return tokenizer.name


def cached(name: str) -> bool:
    """Whether tiktoken has the files of that encoding, so that no network is needed."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", "/tmp/data-gym-cache")
    urls = [data.tokenizer.AZURE + path for path in data.tokenizer.NAMED[name]]
    return all(Path(folder, data.tokenizer.hashlib.sha1(url.encode()).hexdigest()).is_file() for url in urls)


@pytest.mark.parametrize("tokenizer", OURS, ids=name_of)
@given(text=st.one_of(st.text(), ODD.map("".join)))
@example("")
@example("\n\n  x\r\n\r\n \t'S'll 12345 __init__")
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= i < tokenizer.n_vocab for i in ids)
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("tokenizer", OURS, ids=name_of)
def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("tokenizer", OURS, ids=name_of)
def test_a_spelled_special_token_is_text_unless_asked_for(tokenizer):
    text = "cats <|endoftext|> dogs"
    assert tokenizer.end_of_text not in tokenizer.encode(text)
    assert len(tokenizer.encode("<|endoftext|>")) > 1
    ids = tokenizer.encode(text, special=True)
    assert ids.count(tokenizer.end_of_text) == 1
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("tokenizer", OURS, ids=name_of)
def test_a_batch_gives_the_ids_of_each_text(tokenizer):
    texts = [*TEXTS[:20], "", "a", "x" * 300_000, "".join(TEXTS)]
    one, two = (ThreadPoolExecutor(threads) for threads in (1, 2))
    expected = [tokenizer.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, one)] == expected
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, two)] == expected


@pytest.mark.parametrize(
    "text",
    ["^" * 400_000, "a" * 400_000, " " * 400_000, " " * 400_000 + "x", "\n" * 400_000 + "x",
     "".join(np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), 400_000))],
    ids=["carets", "letters", "blanks", "blanks and a letter", "newlines", "no blank"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2", "cl100k_base"])
def test_a_huge_run_is_encoded_quickly(name, text):
    if name in data.tokenizer.NAMED and not cached(name):
        pytest.skip(f"{name} is not in tiktoken's cache")
    tokenizer = {"bytes": BYTES, "bpe": BPE}.get(name) or build_tokenizer(TokenizerConfig(name), list)
    began = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - began < 3
    assert tokenizer.decode_bytes(ids) == text.encode()


def named_pattern(name: str) -> str:
    with patch.object(openai_public, "load_tiktoken_bpe", return_value={}):  # only the pattern is wanted
        return openai_public.r50k_pat_str if name == "gpt2" else getattr(openai_public, name)()["pat_str"]


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base", "bpe"])
def test_cutting_a_text_changes_no_id(name, monkeypatch):
    monkeypatch.setattr(data.tokenizer, "PIECE", 2000)
    pattern = BPE_PATTERN if name == "bpe" else named_pattern(name)
    tokenizer = TiktokenTokenizer(name, pattern, BPE.ranks, BPE.special)
    text = "".join(TEXTS)[:300_000] + "Ein Mädchen, 2 Straßen …\r\n\r\n  l'été 'll 你好，世界。\n　他说 12 345 — \t\n" * 200
    assert len(list(pieces([text]))) > 100
    assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)


def test_no_cut_before_what_only_python_calls_a_blank(monkeypatch):
    monkeypatch.setattr(data.tokenizer, "PIECE", 8)
    ranks = {**BYTES.ranks, b"!\x1c": 256}
    tokenizer = TiktokenTokenizer("bpe", BPE_PATTERN, ranks, {"<|endoftext|>": 257})
    text = "a !!!!\x1c!!!!!!"
    assert 256 in tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)


@given(st.lists(st.text("ab \n.", max_size=90)), st.integers(1, 40))
def test_pieces_do_not_depend_on_how_the_text_arrives(parts, size):
    with patch.object(data.tokenizer, "PIECE", size):
        whole = list(pieces(["".join(parts)]))
        assert list(pieces(parts)) == whole
    assert "".join(whole) == "".join(parts)
    assert all(0 < len(piece) <= size for piece in whole)


def test_vocab_size_counts_every_id():
    assert BPE.n_vocab == 1000 and BPE.end_of_text == 999
    assert build_tokenizer(TokenizerConfig("bpe", 257), lambda: TEXTS).n_vocab == 257
    assert BYTES.n_vocab == 257


def test_a_small_corpus_gives_fewer_ids():
    assert build_tokenizer(TokenizerConfig("bpe", 4096), lambda: ["abab"]).n_vocab < 4096
    assert build_tokenizer(TokenizerConfig("bpe", 4096), list).n_vocab == 257


@pytest.mark.parametrize("size", [256, 0, -1, None])
def test_bpe_needs_every_byte(size):
    with pytest.raises(ValueError, match=f"tokenizer.vocab_size={size} .* 257"):
        TokenizerConfig("bpe", size)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="tokenizer.name=gpt5 .* bytes, bpe, gpt2, cl100k_base, o200k_base"):
        TokenizerConfig("gpt5")


def test_training_bpe_is_deterministic():
    again = build_tokenizer(TokenizerConfig("bpe", 1000), lambda: iter(TEXTS))
    assert again.fingerprint == BPE.fingerprint
    assert again.encode(TEXTS[0]) == BPE.encode(TEXTS[0])
    assert build_tokenizer(TokenizerConfig("bpe", 999), lambda: TEXTS).fingerprint != BPE.fingerprint


@pytest.mark.parametrize("tokenizer", OURS, ids=name_of)
def test_a_saved_tokenizer_is_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.name, loaded.n_vocab, loaded.end_of_text) == (tokenizer.name, tokenizer.n_vocab, tokenizer.end_of_text)
    assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_an_id_without_a_token_is_visible_and_one_outside_is_refused():
    holes = TiktokenTokenizer("holes", BPE_PATTERN, data.tokenizer.BYTES, {"<|endoftext|>": 300})
    assert holes.n_vocab == 301
    assert holes.decode([97, 299, 98]) == "a\ufffdb"
    for outside in (301, -1):
        with pytest.raises(ValueError, match=f"{outside} is outside the 301 ids"):
            holes.decode([outside])


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_without_network_or_file_one_line_says_what_to_do(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(ValueError) as caught:
        build_tokenizer(TokenizerConfig(name), list)
    message = str(caught.value)
    url = data.tokenizer.AZURE + data.tokenizer.NAMED[name][0]
    stored = data.tokenizer.hashlib.sha1(url.encode()).hexdigest()
    for part in (f"tokenizer.name={name}", url, stored, "TIKTOKEN_CACHE_DIR", "tokenizer=bytes", "tokenizer=bpe"):
        assert part in message
    assert "\n" not in message
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_a_cached_encoding_needs_no_network(name, monkeypatch):
    if not cached(name):
        pytest.skip(f"{name} is not in tiktoken's cache")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    tokenizer = build_tokenizer(TokenizerConfig(name), list)
    theirs = tiktoken.get_encoding(name)
    assert tokenizer.n_vocab == theirs.n_vocab and tokenizer.end_of_text == theirs.eot_token
    assert tokenizer.encode("".join(TEXTS)) == theirs.encode_ordinary("".join(TEXTS))


# Foreign tokenizers


def byte_level(folder: Path, **settings) -> ForeignTokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|user|>"])
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    return written(tokenizer, folder, **settings)


def sentencepiece_like(folder: Path, **settings) -> ForeignTokenizer:
    """As Llama's: blanks spelled U+2581, one put in front, bytes for what the vocabulary lacks."""
    learned = tokenizers.Tokenizer(models.BPE())
    learned.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learned.train_from_iterator(" ".join(TEXTS[:3]).split()[:3000], trainers.BpeTrainer(vocab_size=400))
    content = json.loads(learned.to_str())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in content["model"]["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = learned.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return written(tokenizer, folder, eos_token={"content": "</s>"}, **settings)


def written(tokenizer: tokenizers.Tokenizer, folder: Path, **settings) -> ForeignTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["byte level", "sentencepiece"])
def foreign(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return byte_level(folder, eos_token="<|end|>") if request.param == "byte level" else sentencepiece_like(folder)


@given(text=st.one_of(st.text(), ODD.map("".join)).map(lambda text: text.replace("▁", "")))
def test_any_text_comes_back_from_a_foreign_tokenizer(foreign, text):
    ids = foreign.encode(text)
    assert foreign.decode_bytes(ids) == text.encode()
    assert [foreign.encode(text)] == [batch.tolist() for batch in foreign.encode_batch([text], POOL)]


def test_foreign_ids_are_the_library_s(foreign, tmp_path):
    foreign.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    for text in TEXTS[10:15]:
        assert foreign.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_foreign_special_tokens_are_text_unless_asked_for(foreign):
    end = foreign.tokenizer.id_to_token(foreign.end_of_text)
    assert foreign.end_of_text not in foreign.encode(f"a {end} b")
    assert foreign.decode(foreign.encode(f"a {end} b")) == f"a {end} b"
    assert foreign.encode(f"a{end}b", special=True).count(foreign.end_of_text) == 1
    assert foreign.end_of_text not in foreign.encode(f"a {end} b")  # asking once changes nothing


def test_a_foreign_text_that_goes_on_keeps_its_blanks(foreign):
    text = "class Word: pass  # été"
    ids = foreign.encode(text)
    stream = TextStream(foreign)
    assert ("".join(map(stream.push, ids)) + stream.flush()).removeprefix(" ") == text
    middle = foreign.encode("a b")[-1]
    assert TextStream(foreign).push(middle) == foreign.token_bytes(middle).decode()


def test_a_saved_foreign_tokenizer_is_equal(foreign, tmp_path):
    foreign.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == foreign.fingerprint
    assert loaded.end_of_text == foreign.end_of_text
    assert loaded.prefix == foreign.prefix


def test_the_prefix_is_what_the_tokenizer_puts_first(tmp_path):
    assert sentencepiece_like(tmp_path).prefix == [1]
    assert byte_level(tmp_path, eos_token="<|end|>").prefix == []
    assert BPE.prefix == []


def test_the_end_of_text_comes_from_whichever_file_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert byte_level(tmp_path).end_of_text == 7
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert byte_level(tmp_path).end_of_text == 1
    byte_level(tmp_path).save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").end_of_text == 1
    assert byte_level(tmp_path, eos_token="<|end|>").end_of_text == 0
    chat = byte_level(tmp_path, eos_token="<|end|>")
    assert chat.ends == [0, 1]  # all that end the text of a chat model
    chat.save(tmp_path / "chat")
    assert load_tokenizer(tmp_path / "chat").ends == [0, 1]


def test_a_chat_template_is_kept(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n")
    byte_level(tmp_path, eos_token="<|end|>").save(tmp_path / "saved")
    load_tokenizer(tmp_path / "saved").save(tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "{{ messages }}\n"


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"name": "bpe", "pattern": "(", "special_tokens": {}, "ranks": []}'])
@pytest.mark.parametrize("name", ["tiktoken.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named_in_one_line(name, content, tmp_path):
    if name != "tiktoken.json":
        byte_level(tmp_path, eos_token="<|end|>")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_foreign_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    for named in ("{}", '{"eos_token_id": null}', '{"eos_token_id": []}'):
        (tmp_path / "config.json").write_text(named)
        with pytest.raises(ValueError, match="names no end-of-text token"):
            byte_level(tmp_path)


def test_a_foreign_decoder_that_is_not_understood_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        written(tokenizer, tmp_path, eos_token="a")
