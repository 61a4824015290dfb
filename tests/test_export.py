"""Our models as Hugging Face folders: `transformers` must compute what we compute."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data.tokenizer import TiktokenTokenizer, Tokenizer, TokenizerConfig, build_tokenizer
from model import ModelConfig, Sampling, Transformer, generate
from tests.foreign_models import CONFIGS, greedy, save_random
from weights import checkpoint, export_tokenizer
from weights.export import choose_family, export
from weights.huggingface import read_model
from weights.model_card import command_of

ROOT = Path(__file__).parent.parent
TEXT = "".join(path.read_text() for path in sorted((ROOT / "model").glob("*.py"))) + "L'été, 它們 ünïcödé €5 🙂🙂 "
NUMBERS = " ".join(str(n * n) for n in range(5000))  # so that there are tokens of several digits


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(name="bpe", vocab_size=400), lambda: [TEXT + NUMBERS])


def random_model(**values) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "context_length": 64, "n_layers": 2, "n_heads": 4, "d_model": 32, "d_ff": 48}
    model = Transformer(ModelConfig(**{**sizes, **values}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (1 if p.dim() == 1 else 2 / p.size(-1) ** 0.5))
    return model.eval()


def save(model: Transformer, tokenizer: Tokenizer, folder: Path, **about) -> Path:
    checkpoint.save(folder, model.config, model.state_dict(), tokenizer, {}, about)
    return folder


GPT2 = {"position": "learned", "norm": "layernorm", "mlp": "gelu"}
SHAPES = [
    ("llama", {}),
    ("llama", {"n_kv_heads": 2, "tie_embeddings": False, "norm_eps": 1e-3, "head_dim": 10, "rope_theta": 300.0}),
    ("llama", {"bias": True}),
    ("llama", {"bias": True, "mlp_bias": False}),
    ("llama", {"bias": True, "qkv_bias": False}),  # its key, query and value biases become zeros
    (
        "llama",
        {
            "rope_scaling": {
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_context_length": 16.0,
            }
        },
    ),
    ("mistral", {"n_heads": 5, "head_dim": 8}),  # transformers' Llama wants d_model to be a multiple of n_heads
    ("qwen2", {"qkv_bias": True}),
    ("qwen3", {"qk_norm": True}),
    ("qwen3", {"qk_norm": True, "n_kv_heads": 1, "tie_embeddings": False, "head_dim": 16}),
    ("qwen3", {"qk_norm": True, "vocab_size": 448}),  # a head padded beyond the tokenizer
    ("gpt2", {**GPT2, "bias": True}),
    ("gpt2", {**GPT2, "bias": False, "tie_embeddings": False}),
]


@pytest.mark.parametrize("family, values", SHAPES)
def test_transformers_computes_our_logits_and_our_text(family, values, bpe, tmp_path):
    model = random_model(**values)
    assert export(save(model, bpe, tmp_path / "ours"), tmp_path / "out") == family
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.model_type == family and theirs.dtype == torch.float32
    ids = torch.tensor([bpe.encode(TEXT)[:60]])
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-4
    prompt = ids[:, :5]
    ours = generate(model, prompt.tolist(), 40, sampling=Sampling(temperature=0), n_vocab=bpe.n_vocab, stop_ids=[bpe.end_of_text])
    assert greedy(theirs, prompt, 40) == ours


@pytest.mark.parametrize("family, values", SHAPES)
def test_out_and_in_again_is_the_same_model(family, values, bpe, tmp_path):
    model = random_model(**values)
    export(save(model, bpe, tmp_path / "ours"), tmp_path / "out")
    back = read_model(tmp_path / "out").state_dict()
    ours = model.state_dict()
    assert all(torch.equal(back[name], ours[name]) for name in ours)
    assert all((back[name] == 0).all() for name in back.keys() - ours.keys())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_and_out_again_is_the_same_file(name, dtype, bpe, tmp_path):
    theirs = save_random(name, tmp_path / "theirs", dtype)
    bpe.save(tmp_path / "theirs")
    export(tmp_path / "theirs", tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == dtype for name in before)
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    same = ("vocab_size", "tie_word_embeddings", "num_attention_heads", "rope_parameters", "rms_norm_eps", "layer_norm_epsilon")
    for key in same:
        assert getattr(again, key, None) == getattr(theirs.config, key, None), key


@pytest.mark.parametrize(
    "values, key, nearest",
    [
        ({"position": "alibi"}, "model.position=alibi", "llama"),
        ({"position": "none", "qk_norm": True}, "model.position=none", "qwen3"),
        ({"position": "sinusoidal", "d_model": 30, "n_heads": 2}, "model.position=sinusoidal", "llama"),
        ({"mlp": "relu2"}, "model.mlp=relu2", "llama"),
        ({"mlp": "gelu"}, "model.mlp=gelu", "llama"),
        ({"norm": "layernorm"}, "model.norm=layernorm", "llama"),
        ({**GPT2, "bias": True, "n_kv_heads": 2}, "model.n_kv_heads=2", "gpt2"),
        ({**GPT2, "bias": True, "qk_norm": True}, "model.qk_norm=True", "gpt2"),
        ({**GPT2, "position": "rope", "bias": True}, "model.position=rope", "gpt2"),
        ({"qk_norm": True, "bias": True}, "model.qk_norm=True", "llama"),
        ({"qk_norm": True, "qkv_bias": True}, "model.qk_norm=True", "qwen2"),
    ],
)
def test_the_key_that_no_format_has_is_named(values, key, nearest, bpe, tmp_path):
    model = random_model(**values)
    with pytest.raises(ValueError, match=rf"^{key} cannot be exported: .* \(the nearest is {nearest}'s\)$") as raised:
        export(save(model, bpe, tmp_path / "ours"), tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_every_preset_can_be_exported():
    import yaml

    for path in (ROOT / "configs" / "model").glob("*.yaml"):
        family = choose_family(ModelConfig(**{"vocab_size": 4096, **yaml.safe_load(path.read_text())}))
        assert family == ("gpt2" if path.stem == "gpt2" else "qwen3")


def test_training_options_do_not_stand_in_the_way():
    assert choose_family(ModelConfig(vocab_size=9, dropout=0.1, zero_init=True)) == "llama"


def test_a_padded_id_is_never_written_by_transformers(bpe, tmp_path):
    """The best id is beyond the tokenizer's at every step."""
    model = random_model(vocab_size=bpe.n_vocab + 5, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[: bpe.n_vocab] *= 1e-3
    export(save(model, bpe, tmp_path / "ours"), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert max(greedy(theirs, torch.tensor([[1, 2, 3]]), 20)[0]) < bpe.n_vocab


class AsExported:
    """A tokenizer of ours, and the one that AutoTokenizer makes of its export."""

    def __init__(self, ours: Tokenizer, folder: Path):
        self.ours = ours
        export_tokenizer.save_tokenizer(ours, folder, 10**6)
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        self.theirs = transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def exported(request, bpe, tmp_path_factory) -> AsExported:
    ours = bpe if request.param == "bpe" else build_tokenizer(TokenizerConfig(name="bytes"), list)
    return AsExported(ours, tmp_path_factory.mktemp(request.param))


WORDS = st.sampled_from(TEXT.split()) | st.integers(0, 10**9).map(str)
ODD = st.sampled_from(
    ["<|endoftext|>", "  ", "\n\n", "\r\n", " \t", "'ll", "'LL", "ſ", "\u0085", "\u2028", "它們", "e\u0301", "🙂"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | ODD | WORDS).map("".join))
def test_autotokenizer_gives_our_ids_for_any_text(exported, text):
    ids = exported.ours.encode(text)
    assert exported.theirs(text)["input_ids"] == ids
    assert exported.theirs.decode(ids) == text


def test_special_tokens_of_an_exported_tokenizer(exported):
    ours, theirs = exported.ours, exported.theirs
    end = ours.end_of_text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id, len(theirs)) == (end, end, end, ours.n_vocab)
    assert theirs("a<|endoftext|>b", split_special_tokens=False)["input_ids"] == [*ours.encode("a"), end, *ours.encode("b")]
    assert theirs.decode([*ours.encode("ab"), end], skip_special_tokens=True) == "ab"
    assert theirs(["", "ab"], padding=True)["input_ids"][0][0] == end


def test_a_foreign_tokenizer_keeps_its_special_tokens(bpe, tmp_path):
    special = {"<|endoftext|>": 400, "<|begin|>": 401, "<|pad|>": 402}
    save(random_model(vocab_size=403), bpe, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "theirs")
    export_tokenizer.save_tokenizer(TiktokenTokenizer("bpe", bpe.pattern, bpe.ranks, special), tmp_path / "theirs", 64)
    named = {"eos_token": "<|endoftext|>", "bos_token": "<|begin|>", "pad_token": {"__type": "AddedToken", "content": "<|pad|>"}}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(named))
    export(tmp_path / "theirs", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        described = json.loads((tmp_path / "out" / name).read_text())
        assert [described[f"{key}_token_id"] for key in ("eos", "bos", "pad")] == [[400, 399], 401, 402]  # 399 ended it before
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token, theirs.pad_token) == ("<|begin|>", "<|pad|>")
    assert theirs("a<|begin|>")["input_ids"] == [*bpe.encode("a"), 401]


def test_a_chat_model_keeps_all_that_ends_a_text(bpe, tmp_path):
    export(save(random_model(), bpe, tmp_path / "ours"), tmp_path / "theirs")
    path = tmp_path / "theirs" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [bpe.end_of_text, 7]}))
    export(tmp_path / "theirs", tmp_path / "out")
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == [bpe.end_of_text, 7]


PATTERNS = {  # those of GPT-2, GPT-4 and GPT-4o
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    "o200k_base": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_patterns_of_named_tokenizers_split_alike_in_both_engines(name, bpe):
    """Ranks with a token that no merges lead to, and ids with gaps, as the named tokenizers have them."""
    ranks = {**bpe.ranks, b" zqxj": 399}
    special = {"<|endoftext|>": 405, "<|endofprompt|>": 410}
    ours = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special)
    theirs = export_tokenizer.as_theirs(ranks, special, PATTERNS[name])
    draw = random.Random(0)
    letters = "aA1234 \n\t'sSlL/!éЖ中\r\u3000\u0301ßǅʰ€🙂"
    texts = ["".join(draw.choice(letters) for _ in range(draw.randint(1, 30))) for _ in range(2000)]
    for text in [*texts, " zqxj", "a zqxj zqxj", TEXT, NUMBERS]:
        assert theirs.encode(text).ids == ours.encode_ordinary(text), text
    assert theirs.encode("<|endofprompt|>a").ids == [410, *ours.encode_ordinary("a")]


def run_folder(bpe: Tokenizer, folder: Path) -> Path:
    rows = [{"step": 5, "train/loss": 5.5}, {"step": 5, "val/loss": 5.25, "val/ppl": 190.57, "val/bpb": 2.5}]
    rows += [{"step": 10, "train/loss": 4.5}, {"step": 15, "train/loss": 3.5}]
    about = {"step": 10, "tokens": 12345678, "command": "train.py steps=15"}
    step = save(random_model(qk_norm=True), bpe, folder / "checkpoints" / "step-00000010", **about)
    checkpoint.point(folder / "checkpoints" / "latest", step)
    (folder / "config.yaml").write_text("data:\n  source: files\n  path: poems.txt\n  name: null\nsteps: 15\nseed: 7\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_command_writes_a_card_of_the_run(bpe, tmp_path):
    run = run_folder(bpe, tmp_path / "run")
    command = [sys.executable, "-m", "weights.export", str(run), str(tmp_path / "poet")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, "") and "qwen3 format" in found.stdout
    card = (tmp_path / "poet" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# poet\n" in card
    for fact in (
        "| data | files: poems.txt |",
        "| tokens | 12,345,678 seen in 10 steps |",
        "| training loss | 4.5000 (step 10) |",
        "| validation loss | 5.2500, perplexity 190.57, 2.5000 bits per byte (step 5) |",
        "```bash\npython train.py steps=15\n```",
        "seed: 7",
    ):
        assert fact in card
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {path.name for path in (tmp_path / "poet").iterdir()} == names
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (
        again.returncode != 0
        and again.stderr == f"error: {tmp_path / 'poet'} exists already: choose another name, or remove it\n"
    )


@pytest.mark.parametrize("damage", ["half a row", "no yaml", "a list"])
def test_what_is_damaged_beside_a_checkpoint_costs_facts_not_the_export(damage, bpe, tmp_path):
    run = run_folder(bpe, tmp_path / "run")
    if damage == "half a row":
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 10, "val/lo')
    else:
        (run / "config.yaml").write_text("a: [" if damage == "no yaml" else "- 1\n")
    assert export(run, tmp_path / "poet") == "qwen3"
    card = (tmp_path / "poet" / "README.md").read_text()
    assert "| training loss | 4.5000 (step 10) |" in card and ("poems.txt" in card) == (damage == "half a row")


@pytest.mark.parametrize("stored", ["train.py steps=15", "/home/ada/sprout/train.py steps=15", "python train.py steps=15"])
def test_the_command_of_a_card_is_one_that_runs(stored):
    assert command_of({"command": stored}) == "python train.py steps=15"


def test_the_command_of_a_card_keeps_its_words(bpe, tmp_path):
    """Whatever is in them: a bar would end a table's cell."""
    words = ["train.py", "prompt=a|b", "data.path=two words.txt"]
    ours = save(random_model(), bpe, tmp_path / "ours", command=shlex.join(words))
    export(ours, tmp_path / "out")
    shown = re.search(r"```bash\n(.*?)\n```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    assert shlex.split(shown[1]) == ["python", *words]


def test_an_export_is_complete_or_absent(bpe, tmp_path, monkeypatch):
    ours = save(random_model(), bpe, tmp_path / "ours")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        export(ours, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_empty_folder_is_used_and_a_full_one_is_not_touched(bpe, tmp_path):
    ours = save(random_model(), bpe, tmp_path / "ours")
    (tmp_path / "out").mkdir()
    export(ours, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists already"):
        export(ours, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_neighbour_that_looks_temporary_is_not_touched(bpe, tmp_path):
    ours = save(random_model(), bpe, tmp_path / "ours")
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "thesis.tex").write_text("years of work")
    export(ours, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out", "out.tmp"]
    assert [path.name for path in (tmp_path / "out.tmp").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "out.tmp").stat().st_mode


def test_lone_surrogates_aside_there_is_no_text_that_is_not_encoded_alike(exported):
    """A Python string can hold half a character, which no UTF-8 can: ours replaces it, theirs refuses it."""
    assert exported.ours.encode("a\ud800b") == exported.theirs("a\ufffdb")["input_ids"]
