"""sample.py as its users meet it: prompts in, text out, one line for each mistake."""

import io
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sample
from model import Transformer
from tests.tiny_models import BYTES, successor_model, tiny
from weights import checkpoint

ROOT = Path(__file__).parent.parent
SPEED = re.compile(r"prefill (\d+) tokens, \d+ tokens/s; decode (\d+) tokens, \d+ tokens/s")


def save_run(run: Path, model: Transformer) -> Path:
    folder = run / "checkpoints" / "step-00000001"
    checkpoint.save(folder, model.config, model.state_dict(), BYTES, trainer={}, about={})
    checkpoint.point(folder.parent / "latest", folder)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """random: a tiny model; alphabet: one that is certain of the next letter; half: a float16 checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "random", tiny(vocab_size=257, context_length=64))
    save_run(folder / "alphabet", successor_model(b"abcdefgh", context_length=16))
    save_run(folder / "word", successor_model("né€!".encode(), end=BYTES.end_of_text))
    save_run(folder / "bfloat16", tiny(vocab_size=257, dtype=torch.bfloat16))
    save_run(folder / "float16", tiny(vocab_size=257, dtype=torch.float16))
    return folder


@pytest.fixture
def call(runs, capsys, monkeypatch):
    """sample.py in this process: (exit status, stdout, lines of stderr)."""

    def run(*arguments: str, checkpoint: str | None = "random", stdin: bytes | None = None) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        chosen = [] if checkpoint is None else ["--checkpoint", str(runs / checkpoint)]
        try:
            status = sample.main([*chosen, *arguments])
        except SystemExit as error:  # argparse's
            status = error.code
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


def text(result: tuple[int, str, list[str]]) -> str:
    assert result[0] == 0, result
    return result[1]


def start(*arguments: str) -> subprocess.Popen:
    """sample.py in a process of its own, whose output Python buffers, as it does unless told otherwise."""
    command = [sys.executable, str(ROOT / "sample.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_prints_prompt_and_continuation_and_the_rest_on_stderr(call):
    status, out, err = call("--prompt", "abc", "--max-new-tokens", "5", checkpoint="alphabet")
    assert (status, out) == (0, "abcdefgh\n")
    assert len(err) == 1 and SPEED.fullmatch(err[-1]).groups() == ("3", "4")


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_whole_characters_until_end_of_text(call, stream):
    assert text(call("--prompt", "n", *stream, checkpoint="word")) == "né€!\n"


def test_several_samples_are_separated_and_are_those_of_the_seeds_that_follow(call):
    options = ["--prompt", "ab", "--max-new-tokens", "20", "--temperature", "1.2"]
    together = text(call(*options, "--seed", "5", "--num-samples", "3")).removesuffix("\n").split("\n---\n")
    assert together == [text(call(*options, "--seed", str(5 + i))).removesuffix("\n") for i in range(3)]
    assert len(set(together)) == 3 and all(one.startswith("ab") for one in together)
    assert text(call(*options, "--seed", "5")) == text(call(*options, "--seed", "5"))


def test_speed_counts_the_prompt_once_and_the_new_tokens_of_all_samples(call):
    *_, last = call("--prompt", "abc", "--max-new-tokens", "5", "--num-samples", "4", checkpoint="alphabet")[2]
    assert SPEED.fullmatch(last).groups() == ("3", "16")


def test_prompts_come_from_the_argument_a_file_or_stdin(call, tmp_path):
    prompt = "roses\r\nviolets é\n\n"  # taken as it is, line ends too
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    said = text(call("--prompt", prompt, "--max-new-tokens", "9"))
    assert said.startswith(prompt)
    assert text(call("--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "9")) == said
    assert text(call("--max-new-tokens", "9", stdin=prompt.encode())) == said


@pytest.mark.parametrize(("arguments", "stdin"), [(["--prompt", ""], None), ([], b""), ([], None)])
def test_without_a_prompt_a_new_text_begins(call, arguments, stdin):
    status, out, err = call(*arguments, "--max-new-tokens", "9", stdin=stdin)
    assert status == 0 and out != "\n" and "new text" in err[0]
    assert out == text(call("--prompt", "<|endoftext|>", "--special", "--max-new-tokens", "9"))[len("<|endoftext|>") :]


@pytest.mark.parametrize("prompt", ["\n", " ", "-x", "--seed", "<|endoftext|>", "\x00", "\ufffd", "a" * 200])
def test_odd_prompts_are_continued(call, prompt):
    said = text(call("--prompt", prompt, "--max-new-tokens", "9"))
    assert said.startswith(prompt) and len(said) > len(prompt) + 1
    assert text(call(f"--prompt={prompt}", "--max-new-tokens", "9")) == said


def test_a_prompt_longer_than_the_context_warns_in_one_line(call):
    _, _, err = call("--prompt", "a" * 200, "--max-new-tokens", "1")
    assert len(err) == 2 and "200 tokens" in err[0] and "last 64" in err[0]


def test_bytes_that_are_no_text_are_refused_with_their_place(call, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    escaped = os.fsdecode(b"caf\xe9")
    for result in (call("--prompt-file", str(tmp_path / "latin1.txt")), call(stdin=b"caf\xe9"), call("--prompt", escaped)):
        status, out, err = result
        assert (status, out, len(err)) == (2, "", 1)
        assert "byte 3" in err[0] and "0xe9" in err[0] and "UTF-8" in err[0]


def test_special_tokens_are_text_unless_special(call):
    plain = call("--prompt", "a<|endoftext|>", "--max-new-tokens", "2", "--temperature", "0")
    special = call("--prompt", "a<|endoftext|>", "--max-new-tokens", "2", "--temperature", "0", "--special")
    assert SPEED.fullmatch(plain[2][-1])[1] == "14" and SPEED.fullmatch(special[2][-1])[1] == "2"
    assert text(plain) != text(special)


def test_no_temperature_is_the_same_for_any_seed(call):
    options = ["--prompt", "ab", "--max-new-tokens", "20"]
    greedy = {
        text(call(*options, "--temperature", temperature, "--seed", seed))
        for temperature, seed in (("0", "0"), ("0", "1"), ("1e-8", "2"))
    }
    assert len(greedy) == 1
    assert greedy == {text(call(*options, "--top-k", "1"))} == {text(call(*options, "--min-p", "1", "--top-k", "0"))}


@pytest.mark.parametrize("stops", [["--stop", "de"], ["--stop", "zz", "--stop", "defg"], ["--stop=de"]])
def test_stop_strings_end_the_text_and_are_not_printed(call, stops):
    assert text(call("--prompt", "a", *stops, checkpoint="alphabet")) == "abc\n"


def test_a_stop_string_may_begin_with_a_dash(call):
    assert text(call("--prompt", "a", "--stop", "-d", "--max-new-tokens", "3", checkpoint="alphabet")) == "abcd\n"


def test_overflow_slides_or_stops_with_a_notice(call):
    options = ["--prompt", "abcdefgh", "--max-new-tokens", "40", "--temperature", "0"]
    status, out, err = call(*options, "--overflow", "stop", checkpoint="alphabet")
    assert (status, out) == (0, 2 * "abcdefgh" + "\n") and "context of 16 tokens is full" in err[0]
    for cache in ([], ["--no-cache"]):
        status, out, err = call(*options, *cache, checkpoint="alphabet")
        assert (status, out, len(err)) == (0, 6 * "abcdefgh" + "\n", 1)


def test_the_cache_and_the_way_of_printing_change_nothing(call):
    options = ["--prompt", "abc", "--max-new-tokens", "100"]
    said = text(call(*options))
    assert text(call(*options, "--no-cache")) == text(call(*options, "--no-stream")) == said


def test_no_tokens_are_the_prompt(call):
    status, out, err = call("--prompt", "abc", "--max-new-tokens", "0")
    assert (status, out) == (0, "abc\n") and SPEED.fullmatch(err[-1])[2] == "0"


def test_the_newest_run_is_the_default(call, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("--prompt", "a", checkpoint=None)
    assert status != 0 and out == "" and len(err) == 1 and "python train.py" in err[0]
    save_run(tmp_path / "runs" / "old", successor_model(b"ax"))
    save_run(tmp_path / "runs" / "new", successor_model(b"abcdefgh"))
    for name, time in (("old", 1), ("new", 2)):
        os.utime(tmp_path / "runs" / name / "checkpoints" / "step-00000001", (time, time))
    assert text(call("--prompt", "a", "--max-new-tokens", "3", checkpoint=None)) == "abcd\n"


@pytest.mark.parametrize(
    ("asked", "checkpoint", "dtype"),
    [
        ([], "bfloat16", torch.bfloat16),
        ([], "random", torch.float32),
        (["--dtype", "auto"], "bfloat16", torch.bfloat16),
        (["--dtype", "bfloat16"], "random", torch.bfloat16),
    ],
)
def test_the_type_is_the_checkpoints_unless_asked_for(runs, call, asked, checkpoint, dtype):
    model, _ = sample.load_model(sample.parse(["--checkpoint", str(runs / checkpoint), *asked]))
    assert {p.dtype for p in model.parameters()} == {dtype} and not model.training
    text(call("--prompt", "a", "--max-new-tokens", "9", *asked, checkpoint=checkpoint))


def test_logprobs_list_each_token_with_others(call):
    status, out, err = call("--prompt", "abc", "--max-new-tokens", "4", "--logprobs", "2", checkpoint="alphabet")
    assert (status, out) == (0, "abcdefg\n")
    assert "ln p" in err[0] and [line.split()[0] for line in err[1:5]] == ["'d'", "'e'", "'f'", "'g'"]
    assert all(len(re.findall(r"[01]\.\d{4}", line)) == 3 for line in err[1:5])
    err = call("--prompt", "a", "--max-new-tokens", "2", "--logprobs", "--num-samples", "2", checkpoint="alphabet")[2]
    assert err[3] == "---" and len(err) == 8


@pytest.mark.parametrize("layer", [[], ["--attention-layer", "1"]])
def test_attention_map_is_a_picture(call, tmp_path, layer):
    path = tmp_path / "map.png"
    status, out, err = call("--prompt", "abc", "--max-new-tokens", "2", "--attention-map", str(path), *layer)
    assert status == 0 and path.read_bytes().startswith(b"\x89PNG") and str(path) in err[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "hot"], "invalid float value: 'hot'"),
        (["--top-k", "-5"], "top_k=-5"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--min-p", "2"], "min_p=2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["--num-samples", "0"], "--num-samples=0"),
        (["--max-new-tokens", "-1"], "max_new_tokens=-1"),
        (["--logprobs", "-1"], "--logprobs=-1"),
        (["--stop", ""], "empty stop"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt-file"),
        (["--prompt"], "--prompt"),
        (["--temp", "1"], "--temp"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--checkpoint", "/nowhere/run"], "/nowhere/run"),
        (["--checkpoint", ""], "--checkpoint is empty"),
        (["--stop", "\udcff"], "--stop is not UTF-8"),
        (["--device", "cpu:abc"], "device=cpu:abc"),
        (["--checkpoint", "tests"], "tests holds no checkpoint"),
        (["--device", "tpu"], "device=tpu"),
        (["--dtype", "float16"], "float16 needs CUDA"),
        (["--dtype", "int8"], "int8"),
        (["--overflow", "wrap"], "wrap"),
        (["--prompt", "a" * 64, "--overflow", "stop"], "64 tokens, which fill the context of 64"),
        (["--attention-map", "map.xyz"], "xyz"),
        (["--attention-map", "/nowhere/map.png"], "/nowhere/map.png"),
        (["--attention-map", "map.png", "--attention-layer", "2"], "--attention-layer=2"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_get_one_line_and_status_2(call, arguments, message):
    status, out, err = call(*arguments)
    assert status == 2 and message in err[-1] and err[-1].startswith("sample.py: error: ")
    assert out == "" and not [line for line in err if "Traceback" in line]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_without_cuda_and_a_float16_checkpoint_are_refused_not_replaced(call):
    for result in (call("--device", "cuda"), call(checkpoint="float16")):
        status, out, err = result
        assert (status, out) == (2, "") and "cpu" in err[-1]
    assert call("--dtype", "float32", "--max-new-tokens", "2", checkpoint="float16")[0] == 0


def test_help_answers_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = start("--help")
    out, err = process.communicate(timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0 and err == b"" and b"--prompt TEXT" in out
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_text_streams_and_an_interrupt_ends_it_in_one_line(runs):
    """6,000 letters would fit into the buffer of a pipe: unless they are flushed they come at the end, all at once."""
    process = start("--checkpoint", str(runs / "alphabet"), "--prompt", "a", "--max-new-tokens", "6000")
    assert process.stdout.read(30).startswith(b"abcdefghabcdefgh")  # while it goes on writing
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith(b"\n")
    interrupted, speed = err.decode().splitlines()
    assert "interrupted" in interrupted and SPEED.fullmatch(speed)


def test_a_reader_that_has_seen_enough_ends_it_in_one_line(runs):
    process = start("--checkpoint", str(runs / "alphabet"), "--prompt", "a", "--max-new-tokens", "1000000")
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert len(process.stderr.read().splitlines()) == 1


def test_odd_surroundings(runs):
    """Standard input closed, a locale without UTF-8."""
    closed = 'exec "$0" sample.py "$@" <&-'
    command = ["bash", "-c", closed, sys.executable, "--checkpoint", str(runs / "word"), "--prompt", "n"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "né€!\n".encode()), found.stderr
    found = subprocess.run([*command[:1], "-c", closed.replace("<&-", "2>&-"), *command[3:]], cwd=ROOT, capture_output=True)
    assert (found.returncode, found.stdout) == (0, "né€!\n".encode()), "what belongs on stderr is no text"


@pytest.mark.slow
def test_compiled_is_the_same(call):
    options = ["--prompt", "abc", "--max-new-tokens", "150", "--temperature", "0"]
    assert text(call(*options, "--compile")) == text(call(*options))
