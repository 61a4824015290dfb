"""`train` end to end: it learns, starts from other models, evaluates any of them, and compiles where it can."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from tiny_runs import command, configured, contents, differing, finished, metrics, state, tiny, trained

import train
from data.batches import Windows
from data.prepare import prepare
from data.source import DataConfig
from model import Sampling, Transformer
from training.device import choose_device, choose_dtype, fast_bfloat16, out_of_memory
from training.evaluate import evaluate
from training.objective import NextTokenLoss
from training.ranks import Ranks
from training.schedule import learning_rate_share
from training.start import Start
from weights import load
from weights.export import export


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def done(folder):
    """A run whose model has another shape than any preset."""
    finished(*tiny(folder, f"run_dir={folder}/done", "steps=8", "model.position=learned", "eval_every=4", "eval_windows=null"))
    return folder / "done"


def test_it_learns(folder, tmp_path):
    finished(*tiny(folder, f"run_dir={tmp_path}/run", "steps=60", "batch_size=8", "log_every=20"))
    train = [row["train/loss"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    (val,) = [row["val/loss"] for row in metrics(tmp_path / "run") if "val/loss" in row]
    assert train[-1] < 0.6 * torch.tensor(257.0).log()
    assert abs(val - train[-1]) < 0.3


def test_the_learning_rate_is_that_of_the_schedule(folder, tmp_path):
    """As it is told, and as it is used: AdamW's first step moves each weight by it, whatever the gradient."""
    settings = ["optimizer.lr=1e-3", "optimizer.weight_decay=0", "schedule.warmup_steps=4", "save_every=1", "keep_checkpoints=6"]
    config = configured(*tiny(folder, f"run_dir={tmp_path}/run", *settings))
    trained(config)
    told = [row["train/lr"] for row in metrics(tmp_path / "run") if "train/lr" in row]
    assert told == pytest.approx([1e-3 * learning_rate_share(config.schedule, step, 6) for step in range(6)])
    before = Start(None, None).model(replace(config.model, vocab_size=257), config.seed).embed.weight
    after = state(tmp_path / "run" / "checkpoints" / "step-00000001")["model embed.weight"]
    assert (after - before).abs().median().item() == pytest.approx(1e-3 / 4, rel=1e-2)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(folder, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finished(*tiny(folder, f"run_dir={tmp_path}/{name}", f"seed={seed}", "model.dropout=0.1", "steps=3"))
    assert differing(state(tmp_path / "a"), state(tmp_path / "b")) == []
    a, c = (state(tmp_path / name)["model embed.weight"] for name in "ac")
    assert (a - c).std() > 0.02, "they began with the same weights"  # three steps move them by less
    others = [argument for argument in tiny(folder, "steps=1") if not argument.startswith(("model", "tokenizer"))]
    for seed in (1, 2):
        finished(*others, f"init_from={tmp_path}/a", f"run_dir={tmp_path}/order{seed}", f"seed={seed}", "model.dropout=0")
    first, second = (metrics(tmp_path / f"order{seed}")[0]["train/loss"] for seed in (1, 2))
    assert first != second, "they saw the same text"


def test_the_validation_loss_is_that_of_all_targets_by_hand(done, folder):
    model, tokenizer = load(done)
    assert not model.training
    corpus = prepare(DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")), tokenizer, 16, lambda _: None)
    ids = torch.from_numpy(corpus.val.read(0, corpus.val.n_tokens).astype("int64"))
    n, total = 0, 0.0
    for window in range(0, len(ids) - 1, 16):
        at = min(window, len(ids) - 17)
        with torch.no_grad():
            scores = model.eval()(ids[None, at : at + 16])[0].log_softmax(-1)
        for i in range(window - at, 16):
            total -= scores[i, ids[at + i + 1]].item()
            n += 1
    assert n == len(ids) - 1
    (row,) = [row for row in metrics(done) if row["step"] == 8 and "val/loss" in row]
    assert row["val/loss"] == pytest.approx(total / n, rel=1e-5)
    assert row["val/ppl"] == pytest.approx(torch.tensor(total / n).exp().item(), rel=1e-4)
    assert row["val/bpb"] == pytest.approx(total / torch.tensor(2.0).log().item() / corpus.val.n_bytes, rel=1e-5)


def test_evaluation_moves_no_dice_and_no_weights(done, folder):
    model, tokenizer = load(done)
    corpus = prepare(DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")), tokenizer, 16, lambda _: None)
    dropping = Transformer(replace(model.config, dropout=0.5))
    dropping.load_state_dict(model.state_dict())
    objective, windows = NextTokenLoss(dropping).train(), Windows(corpus.val, 16, seed=None)
    before = torch.get_rng_state()
    found = [evaluate(objective, windows, size, Ranks()) for size in (1, 7, 1000)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6) == pytest.approx(found[2].loss, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), before)
    assert objective.training
    part = evaluate(objective, windows, 2, Ranks(), limit=3)
    assert part.n_targets == 48
    assert part.bits_per_byte == pytest.approx(part.loss / math.log(2) * (corpus.val.n_tokens - 1) / corpus.val.n_bytes)


def evaluated(*arguments):
    shown = finished(*arguments, "eval_only=true", "device=cpu", "dtype=float32")
    found = re.search(r"validation loss ([\d.]+) \| perplexity [\d.]+ \| [\d.]+ bits per byte \| [\d,]+ validation", shown.out)
    assert found, shown.out
    return float(found[1])


def test_eval_only_of_any_checkpoint_on_any_text_writes_nothing(done, folder, tmp_path):
    before = contents(done)
    losses = {row["step"]: row["val/loss"] for row in metrics(done) if "val/loss" in row}
    assert evaluated(f"resume={done}") == pytest.approx(losses[8], abs=1e-4)
    assert evaluated(f"resume={done}/checkpoints/step-00000004") == pytest.approx(losses[4], abs=1e-4)
    text = [f"data.path={folder}/text.txt", f"data.cache_dir={folder}/cache"]
    assert evaluated(f"init_from={done}", *text) == pytest.approx(losses[8], abs=1e-4)
    other = tmp_path / "other.txt"
    other.write_text("QUITE ANOTHER TEXT, IN CAPITALS. " * 50)
    assert evaluated(f"resume={done}", f"data.path={other}", f"data.cache_dir={tmp_path}/cache") > losses[8] + 0.3
    assert contents(done) == before
    assert "eval_only=true needs a model" in command("eval_only=true").last


def test_finetuning_takes_model_and_tokenizer_from_the_file(done, folder, tmp_path):
    (tmp_path / "text.txt").write_text("QUITE ANOTHER TEXT, IN CAPITALS. " * 50)
    mine = [argument for argument in tiny(tmp_path) if not argument.startswith(("model", "tokenizer"))]
    run = tmp_path / "tuned"
    changed = ["model.dropout=0.1", "model.context_length=8", "optimizer.grad_clip=1e-20", "optimizer.weight_decay=0"]
    finished(*mine, f"init_from={done}", f"run_dir={run}", *changed, "steps=4")
    table = "model position.table.weight"
    torch.testing.assert_close(state(run)[table], state(done)[table][:8])
    config = json.loads((run / "checkpoints" / "latest" / "config.json").read_text())["model"]
    was = json.loads((done / "checkpoints" / "latest" / "config.json").read_text())["model"]
    assert config == {**was, "dropout": 0.1, "context_length": 8}
    saved = (run / "config.yaml").read_text()
    assert f"init_from: {done}" in saved
    assert "position: learned" in saved and "n_layers: 2" in saved and "name: bytes" in saved
    assert "going on from step 4" in finished(f"resume={run}", "steps=5").out
    again = finished(*mine, f"init_from={done}", f"run_dir={tmp_path}/again", "model.context_length=8", "steps=1")
    assert metrics(tmp_path / "again")[0]["train/loss"] != metrics(run)[0]["train/loss"], again.out  # it has no dropout
    for key, value in (("model.n_layers", 3), ("model", "tiny"), ("tokenizer", "bpe"), ("tokenizer.vocab_size", 300)):
        refused = command(*mine, f"init_from={done}", f"{key}={value}")
        assert f"{key} cannot be set: init_from={done} brings its own" in refused.last
    refused = command(*mine, f"init_from={done}", "experiment=shakespeare_gpu")
    assert f"experiment=shakespeare_gpu cannot be set: init_from={done} brings its own model" in refused.last
    refused = command(*mine, f"init_from={done}", "experiment=finetune", "experiment='shakespeare_gpu'")  # the last one counts
    assert f"experiment=shakespeare_gpu cannot be set: init_from={done} brings its own model" in refused.last
    same = configured(*mine, f"init_from={done}", "model.n_layers=2", "model.position=learned", "tokenizer=bytes")
    assert same.model == configured(*mine, f"init_from={done}").model
    longer = command(*mine, f"init_from={done}", "model.context_length=32", f"run_dir={tmp_path}/longer")
    assert "model.context_length: 16 -> 32, which is longer" in longer.last
    assert not (tmp_path / "longer").exists()


@pytest.mark.parametrize("again", ["resume=auto", "resume"])
def test_a_run_that_goes_on_does_not_need_what_it_began_from(again, done, folder, tmp_path):
    origin, run = tmp_path / "origin", tmp_path / "tuned"
    shutil.copytree(done, origin, symlinks=True)
    mine = [argument for argument in tiny(folder) if not argument.startswith(("model", "tokenizer"))]
    mine += [f"init_from={origin}", "model.dropout=0.1", "tokenizer=bytes"]
    finished(*mine, f"run_dir={run}", "resume=auto", "steps=2")
    shutil.rmtree(origin)
    where = [f"run_dir={run}", again] if again == "resume=auto" else [f"resume={run}/checkpoints/latest"]
    assert "going on from step 2" in finished(*mine, *where, "steps=3").out
    gone = command(*mine, f"run_dir={tmp_path}/other", "resume=auto", "steps=2")
    assert str(origin) in gone.last and not (tmp_path / "other").exists()


def test_its_first_loss_is_that_of_the_model_it_starts_from(done, folder, tmp_path):
    """A gradient that is clipped to nothing leaves it as it was."""
    (row,) = [row for row in metrics(done) if row["step"] == 8 and "val/loss" in row]
    mine = [argument for argument in tiny(folder) if not argument.startswith(("model", "tokenizer"))]
    still = ["steps=1", "optimizer.grad_clip=1e-20", "optimizer.weight_decay=0", "eval_windows=null"]
    finished(*mine, *still, f"init_from={done}", f"run_dir={tmp_path}/still")
    assert metrics(tmp_path / "still")[-1]["val/loss"] == pytest.approx(row["val/loss"], rel=1e-6)


def test_finetuning_a_hugging_face_model_keeps_its_tokenizer(tmp_path):
    finished(*tiny(tmp_path, f"run_dir={tmp_path}/ours", "steps=1"))
    source = tmp_path / "hf"
    export(tmp_path / "ours", source)
    mine = [argument for argument in tiny(tmp_path) if not argument.startswith(("model", "tokenizer"))]
    finished(*mine, f"init_from={source}", "model.context_length=8", f"run_dir={tmp_path}/run", "steps=2")
    assert (tmp_path / "run" / "checkpoints" / "latest" / "tokenizer.json").exists()
    assert "name: tokenizer.json" in (tmp_path / "run" / "config.yaml").read_text()
    assert "going on from step 2" in finished(f"resume={tmp_path}/run", "steps=3").out


def test_a_sample_is_the_prompt_and_what_follows_it(folder, tmp_path, monkeypatch):
    """A blank between them, which sentencepiece's decoders take from the beginning of a text, stays."""
    asked = []
    monkeypatch.setattr(train, "complete", lambda *given, **options: asked.append((given[2:], options)) or [" upon"])
    shown = finished(*tiny(folder, f"run_dir={tmp_path}/run", "steps=1", "prompt=once")).out
    assert "--- sample at step 1\nonce upon\n---\n" in shown
    assert asked == [((["once"], 100), {"sampling": Sampling(temperature=0.8, top_k=50)})]


def test_devices_and_dtypes():
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert choose_device("auto").type in ("cpu", "mps")
        with pytest.raises(ValueError, match="device=cuda was asked for, but this torch"):
            choose_device("cuda")
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu) == (torch.bfloat16 if fast_bfloat16(cpu) else torch.float32)
    with pytest.raises(ValueError, match="dtype=float16 needs CUDA"):
        choose_dtype("float16", cpu)
    assert out_of_memory(MemoryError()) and out_of_memory(torch.OutOfMemoryError("x")) and not out_of_memory(RuntimeError("x"))


def test_bfloat16_learns_alike(folder, tmp_path):
    for dtype in ("float32", "bfloat16"):
        finished(*tiny(folder, f"run_dir={tmp_path}/{dtype}", f"dtype={dtype}", "steps=20", "log_every=20"))
    a, b = (metrics(tmp_path / dtype)[0]["train/loss"] for dtype in ("float32", "bfloat16"))
    assert a != b
    assert a == pytest.approx(b, rel=5e-3)
    assert state(tmp_path / "bfloat16")["model embed.weight"].dtype == torch.float32


def test_documents_can_be_kept_apart(tmp_path):
    """Which changes what is learned of a text of many documents, and nothing for a text that is one."""
    pairs = "".join(f'{{"text": "{a}{b}"}}\n' for a in "abcdefgh" for b in "ijklmnop")
    for name, text, same in (("many.jsonl", pairs, False), ("one.txt", pairs, True)):
        (tmp_path / name).write_text(text)
        losses = []
        for separate in ("true", "false"):
            more = [f"data.path={tmp_path}/{name}", f"run_dir={tmp_path}/{name}-{separate}", f"separate_documents={separate}"]
            finished(*tiny(tmp_path, *more))
            losses.append([row["train/loss"] for row in metrics(tmp_path / f"{name}-{separate}") if "train/loss" in row])
        assert (losses[0] == losses[1]) == same


def test_a_sweep_gives_each_run_its_folder_and_ends_with_a_table(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swept = command("-m", *tiny(folder, f"run_dir={tmp_path}/sweep", "optimizer.lr=1e-4,1e-2,-1"))
    assert swept.status == 1  # of one job, which did not keep the others from running
    assert "error: optimizer.lr=-1.0 must be above 0" in swept.err
    table = swept.out.strip().splitlines()[-4:]
    assert table[0].split() == ["validation", "loss", "run", "overrides"]
    best = [json.loads((tmp_path / f"sweep/{n}/checkpoints/latest/config.json").read_text())["best_val_loss"] for n in (0, 1)]
    assert best[1] < best[0]
    assert table[1].split() == [f"{best[1]:.4f}", f"{tmp_path}/sweep/1", "optimizer.lr=0.01"]
    assert table[2].split() == [f"{best[0]:.4f}", f"{tmp_path}/sweep/0", "optimizer.lr=0.0001"]
    assert table[3].split() == ["failed", "optimizer.lr=-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]  # nothing of Hydra's


@torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",)})
@pytest.mark.slow
def test_no_compiler_is_told_and_the_run_goes_on_without(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    both = []
    for name, compiled in (("compiled", "true"), ("eager", "false")):
        told = finished(*tiny(folder, f"run_dir={tmp_path}/{name}", f"compile={compiled}", "steps=2"))
        both.append("compile=true does not work here" in told.err)
    assert both == [True, False]
    assert differing(state(tmp_path / "compiled"), state(tmp_path / "eager")) == []


@pytest.mark.slow
def test_a_compiled_run_goes_on_as_if_it_had_never_stopped(folder, tmp_path):
    settings = ["compile=true", "model.dropout=0.2", "steps=6", "save_every=1", "keep_checkpoints=6", "micro_batch_size=2"]
    config = configured(*tiny(folder, *settings, f"run_dir={tmp_path}/a"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(config)
        run = shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
        trained(replace(config, run_dir=str(run), resume=f"{run}/checkpoints/step-00000003"))
        assert differing(state(tmp_path / "a"), state(run)) == []
        assert metrics(run) == metrics(tmp_path / "a")
    finally:
        torch.set_num_threads(threads)
    finished(*tiny(folder, *settings, f"run_dir={tmp_path}/eager", "compile=false"))
    eager, compiled = metrics(tmp_path / "eager")[0]["train/loss"], metrics(tmp_path / "a")[0]["train/loss"]
    assert compiled == pytest.approx(eager, rel=0.02)
    eager, compiled = metrics(tmp_path / "eager")[0]["train/grad_norm"], metrics(tmp_path / "a")[0]["train/grad_norm"]
    assert compiled == pytest.approx(eager, rel=0.3), "compiling left a gradient behind"


def test_the_loop_is_short():
    lines = (Path(__file__).parent.parent / "train.py").read_text().splitlines()
    assert len(lines) <= 175
