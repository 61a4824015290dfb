"""Models of the Hugging Face stack, loaded here: against `transformers`, and against GPT-2 written out by hand."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from model import Sampling, generate
from tests.foreign_models import CONFIGS, LLAMA3, greedy, random_model, save_random
from weights.checkpoint import FORMAT
from weights.huggingface import as_theirs, read_model, skeleton
from weights.huggingface_config import to_model_config

TOKENS = torch.randint(60, (2, 50), generator=torch.Generator().manual_seed(0))
ROOT = Path(__file__).parent.parent


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json; a key set to ... is taken out."""
    described = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in described.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_text_are_those_of_transformers(name, tmp_path):
    theirs = save_random(name, tmp_path)
    ours = read_model(tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.5
        assert (ours(TOKENS) - expected).abs().max() < 1e-4
    prompt = TOKENS[:1, :5]
    text = greedy(theirs, prompt, 40, eos_token_id=None)
    for use_cache in (True, False):
        assert generate(ours, prompt.tolist(), 40, sampling=Sampling(temperature=0), use_cache=use_cache) == text


def hand_made_gpt2(d: int = 8, layers: int = 2, vocab: int = 20, context: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (vocab, d), "wpe.weight": (context, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    block = {"ln_1.weight": (d,), "ln_1.bias": (d,), "ln_2.weight": (d,), "ln_2.bias": (d,)}
    block |= {"attn.c_attn.weight": (d, 3 * d), "attn.c_attn.bias": (3 * d,)}
    block |= {"attn.c_proj.weight": (d, d), "attn.c_proj.bias": (d,)}
    block |= {"mlp.c_fc.weight": (d, 4 * d), "mlp.c_fc.bias": (4 * d,), "mlp.c_proj.weight": (4 * d, d), "mlp.c_proj.bias": (d,)}
    shapes |= {f"h.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    return {name: torch.randn(shape, generator=draw) * 0.5 for name, shape in shapes.items()}


def gpt2_by_hand(w: dict[str, Tensor], ids: Tensor, heads: int = 2, layers: int = 2) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    t = ids.numel()
    x = w["wte.weight"][ids] + w["wpe.weight"][:t]
    for i in range(layers):
        q, k, v = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        mixed = []
        for q_h, k_h, v_h in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
            scores = q_h @ k_h.T / math.sqrt(q_h.size(-1))
            scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
            mixed.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v_h)
        x = x + conv(torch.cat(mixed, -1), f"h.{i}.attn.c_proj")
        hidden = conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + conv(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def write_gpt2(folder: Path, weights: dict[str, Tensor]) -> None:
    sizes = {"vocab_size": 20, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_equals_the_equations(prefix, buffers, tmp_path):
    weights = hand_made_gpt2()
    stored = {prefix + name: w for name, w in weights.items()}
    if buffers:
        for i in range(2):
            stored[f"{prefix}h.{i}.attn.bias"] = torch.ones(1, 1, 12, 12, dtype=torch.uint8).tril()
            stored[f"{prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    write_gpt2(tmp_path, stored)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
    with torch.no_grad():
        assert (read_model(tmp_path)(ids[None])[0] - gpt2_by_hand(weights, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda w: w.pop("h.1.mlp.c_fc.bias"), r"lacks weights: transformer\.h\.1\.mlp\.c_fc\.bias;"),
        (lambda w: w.update({"h.2.ln_1.bias": torch.zeros(8)}), r"unknown weights: transformer\.h\.2\.ln_1\.bias;"),
        (lambda w: w.update({"wte.weight": torch.zeros(20, 9)}), r"another shape: .*wte\.weight \[20, 9\] instead of \[20, 8\]"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(19, 8)}), r"another shape: lm_head\.weight \[19, 8\]"),
        (lambda w: w.update({"ln_f.bias": torch.zeros(8, dtype=torch.int8)}), r"another kind: .*ln_f\.bias \(I8\)"),
        (lambda w: [w.pop(f"h.{i}.ln_{j}.bias") for i in (0, 1) for j in (1, 2)], r"lacks .*\.\.\. \(4 in all\)"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(20, 8)}), r"lm_head\.weight is not the embedding"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, named, tmp_path):
    weights = hand_made_gpt2()
    change(weights)
    write_gpt2(tmp_path, weights)
    with pytest.raises(ValueError, match=named) as raised:
        read_model(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_stored_copy_of_a_tied_head_is_fine(tmp_path):
    weights = hand_made_gpt2()
    write_gpt2(tmp_path, {**weights, "lm_head.weight": weights["wte.weight"].clone()})
    model = read_model(tmp_path)
    assert model.head.weight is model.embed.weight


def llama_like(family: str, **keys: object) -> dict[str, object]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"model_type": family, **dict(zip(names, keys.pop("sizes"), strict=True)), "hidden_act": "silu", **keys}


LLAMA31 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED = {  # what matters of the config.json of each, and the number of parameters it is known for
    "openai-community/gpt2": (
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
        },
        124_439_808,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        llama_like("llama", sizes=(32000, 2048, 5632, 22, 32, 4), rope_scaling=None, tie_word_embeddings=False),
        1_100_048_384,
    ),
    "meta-llama/Llama-3.2-1B": (
        llama_like(
            "llama",
            sizes=(128256, 2048, 8192, 16, 32, 8),
            rope_scaling={**LLAMA31, "original_max_position_embeddings": 8192},
            rope_theta=500000.0,
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "mistralai/Mistral-7B-v0.3": (
        llama_like("mistral", sizes=(32768, 4096, 14336, 32, 32, 8), sliding_window=None, rope_theta=1000000.0),
        7_248_023_552,
    ),
    "Qwen/Qwen2.5-0.5B": (
        llama_like(
            "qwen2",
            sizes=(151936, 896, 4864, 24, 14, 2),
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen/Qwen3-0.6B": (
        llama_like(
            "qwen3",
            sizes=(151936, 1024, 3072, 28, 16, 8),
            head_dim=128,
            attention_bias=False,
            sliding_window=None,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_models_of_the_published_size(name):
    described, size = PUBLISHED[name]
    model = skeleton(to_model_config(described))
    assert sum(p.numel() for p in model.parameters()) == size
    theirs = as_theirs(dict(model.named_parameters()), model.config, described["model_type"])
    assert sum(tensor.numel() for tensor in theirs.values()) == size


REFUSED = [
    ("llama", {"model_type": "mixtral"}, "model_type=mixtral is not supported"),
    ("llama", {"model_type": ...}, "model_type=None"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
    ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor, .*is missing"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    ("llama", {"hidden_size": "32"}, "d_model=32 must be a whole number"),
    ("llama", {"max_position_embeddings": None}, "context_length=None must be a whole number"),
    ("llama", {"rms_norm_eps": None}, "is not what it should be"),
    ("llama", {"rope_parameters": [1]}, "is not what it should be"),
    ("llama", {"model_type": ["llama"]}, "is not what it should be|is not supported"),
    ("llama", {"attention_bias": None}, "bias=None must be true or false"),
    ("llama", {"tie_word_embeddings": None}, "tie_embeddings=None must be true or false"),
    ("llama", {"num_attention_heads": 5, "head_dim": 8}, "n_heads=5 is not a multiple of n_kv_heads=2"),
    ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
    ("mistral", {"sliding_window": ...}, "sliding_window=4096"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
]


@pytest.mark.parametrize("name, changes, named", REFUSED)
def test_the_unsupported_is_refused_by_name_before_weights_are_looked_for(name, changes, named, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=named) as raised:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value) and "\n" not in str(raised.value)


def test_what_old_configs_leave_out_is_what_transformers_takes(tmp_path):
    sizes = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = to_model_config({"model_type": "llama", **sizes})
    assert (llama.context_length, llama.kv_heads, llama.head_width, llama.norm_eps) == (2048, 4, 6, 1e-6)
    assert (llama.rope_theta, llama.tie_embeddings, llama.bias, llama.mlp_bias) == (10000.0, False, False, False)
    assert to_model_config({"model_type": "qwen3", **sizes, "num_key_value_heads": 2}).head_width == 128
    mistral = {"model_type": "mistral", **sizes, "sliding_window": None, "num_attention_heads": 16, "head_dim": 4}
    assert to_model_config(mistral).kv_heads == 8


def test_of_two_spellings_the_one_that_transformers_takes_counts():
    described = {**CONFIGS["llama"].to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    described["rope_scaling"] = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    theirs = AutoConfig.for_model(**described)
    assert theirs.rope_parameters["rope_type"] == "llama3"
    assert to_model_config(described).rope_scaling is not None


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_both_spellings_of_rope_mean_the_same(scaling, tmp_path):
    described = {**CONFIGS["llama"].to_dict(), "rope_parameters": {**(scaling or {}), "rope_theta": 700.0}}
    new = to_model_config(described)
    older = {key: value for key, value in described.items() if key != "rope_parameters"} | {"rope_theta": 700.0}
    for kind in ("rope_type", "type"):
        numbers = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
        assert to_model_config({**older, "rope_scaling": scaling and {**numbers, kind: "llama3"}}) == new
    assert new.rope_theta == 700.0 and (new.rope_scaling is None) == (scaling is None)


def test_shards_and_bare_models_load_like_one_file(tmp_path):
    theirs = save_random("qwen3", tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    theirs.base_model.save_pretrained(tmp_path / "bare")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = read_model(tmp_path / "one").state_dict(), read_model(tmp_path / "many").state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)
    with pytest.raises(ValueError, match="lacks weights: lm_head.weight"):  # an untied head that nobody stored
        read_model(tmp_path / "bare")
    save_random("llama tied, one head each", tmp_path / "tied").base_model.save_pretrained(tmp_path / "bare tied")
    tied, bare = read_model(tmp_path / "tied").state_dict(), read_model(tmp_path / "bare tied").state_dict()
    assert all(torch.equal(tied[name], bare[name]) for name in tied)


def test_a_missing_shard_and_a_damaged_index_are_named(tmp_path):
    save_random("qwen3", tmp_path, max_shard_size="10KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(ValueError, match=r"index\.json lists no weights"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(ValueError, match="5 is missing"):
        read_model(tmp_path)


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_a_pickle_is_not_read(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    torch.save({"model.norm.weight": Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*convert it"):
        read_model(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
def test_a_truncated_file_is_one_line(keep, tmp_path):
    save_random("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged \(.*\): fetch it again") as raised:
        read_model(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 538090408\n",
        (16).to_bytes(8, "little") + b'{"a": not JSON} ',
        (62).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}  ' + bytes(4),
    ],
)
def test_a_file_of_another_kind_is_one_line(content, tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged \(.*\): fetch it again"):
        read_model(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_the_file_unless_given(stored, tmp_path):
    random_model("qwen2", stored).save_pretrained(tmp_path)
    raw = load_file(tmp_path / "model.safetensors")
    model = read_model(tmp_path)
    assert {p.dtype for p in model.parameters()} == {stored}
    assert torch.equal(model.embed.weight, raw["model.embed_tokens.weight"])
    assert model.position.table.dtype == torch.float32
    wide = read_model(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.blocks[1].attention.qkv.weight[24:36], raw["model.layers.1.self_attn.k_proj.weight"].double())


MEASURE = """
import re, sys
from pathlib import Path
from weights.huggingface import read_model

def peak():  # not getrusage's, which starts with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
model = read_model(Path(sys.argv[1]))
print(peak() - before)
assert all(bool((p == 0.5).all()) for p in model.parameters())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory")
@pytest.mark.parametrize("family", ["llama", "llama untied", "gpt2", "ours"])
def test_loading_peaks_at_the_size_of_the_file(family, tmp_path):
    """For GPT-2 every matrix is turned round on the way. An untied head comes last in a file, and is large."""
    shared = {"vocab_size": 20000, "tie_word_embeddings": family != "llama untied"}
    if family == "gpt2":
        sizes = {"n_embd": 512, "n_layer": 7, "n_head": 8, "n_positions": 512}
    else:
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 8}
    described = {**shared, **sizes, "model_type": family.split()[0].replace("ours", "llama")}
    model = skeleton(to_model_config(described))
    theirs = as_theirs(dict(model.named_parameters()), model.config, FORMAT if family == "ours" else described["model_type"])
    save_file({name: torch.full(w.shape, 0.5) for name, w in theirs.items()}, tmp_path / "model.safetensors")
    if family == "ours":
        described = {"format": FORMAT, "model": asdict(model.config)}
    (tmp_path / "config.json").write_text(json.dumps(described))
    size = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    print(f"{family}: {int(found.stdout) / size:.3f} of {size / 1e6:.0f} MB")
    assert 0.9 * size < int(found.stdout) < 1.2 * size
