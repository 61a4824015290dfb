"""Models by name: the real client of the hub, against a hub on this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.foreign_models import CONFIGS, save_random
from tests.loopback_hub import COMMIT, Hub, serve

ROOT = Path(__file__).parent.parent
FETCH = """
import json, sys
from weights import hub
from weights.huggingface import read_model

answers = {}
for name in sys.argv[1:]:
    try:
        folder = hub.fetch(name)
        answers[name] = [str(folder), sum(p.numel() for p in read_model(folder).parameters())]
    except ValueError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def fetch(hub: Hub, home: Path, *names: str) -> dict[str, str | list]:
    """The folder and the number of parameters, or the error, of each name; in a process that has never seen another hub."""
    environment = {**os.environ, **hub.environment(home)}
    command = [sys.executable, "-c", FETCH, *names]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    owner = root / "models" / "owner"
    save_random("llama", owner / "whole")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.safetensors"):
        (owner / "whole" / name).parent.mkdir(exist_ok=True)
        (owner / "whole" / name).write_text("large, and of no use here")
    (owner / "whole" / "tokenizer.json").write_text("{}")
    (owner / "whole" / "chat_template.jinja").write_text("{{ messages }}")
    save_random("gpt2", owner / "sharded", max_shard_size="10KB")
    save_random("qwen3", owner / "gated")
    save_random("mistral", owner / "mixture")
    (owner / "mixture" / "config.json").write_text('{"model_type": "mixtral"}')
    CONFIGS["llama"].save_pretrained(owner / "pickled")
    (owner / "pickled" / "pytorch_model.bin").write_text("boom")
    (owner / "dataset").mkdir()
    (owner / "dataset" / "README.md").write_text("no model")
    return root


def test_a_name_is_fetched_once_and_only_what_is_needed(models, tmp_path):
    with serve(Hub(models)) as hub:
        first = fetch(hub, tmp_path, "owner/whole", "owner/sharded", f"owner/whole@{COMMIT}")
        served = [Path(line).name for line in hub.requests if "/resolve/" in line]
        hub.requests.clear()
        again = fetch(hub, tmp_path, "owner/whole", "owner/sharded")
        assert not [line for line in hub.requests if line.startswith("GET") and "/resolve/" in line]
    offline = fetch(hub, tmp_path, "owner/whole", "owner/sharded", "owner/gated")  # nothing answers there any more
    assert first["owner/whole"] == first[f"owner/whole@{COMMIT}"]
    for name in ("owner/whole", "owner/sharded"):
        assert first[name][1] > 5000 and first[name] == again[name] == offline[name]
    assert {path.name for path in Path(first["owner/whole"][0]).iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not {"pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"} & set(served)
    assert "owner/gated is no folder here, not in the hub's cache, and http" in offline["owner/gated"]


def test_what_cannot_be_had_is_one_line(models, tmp_path):
    with serve(Hub(models, gated={"owner/gated": 403})) as hub:
        names = ["owner/nothing", "owner/gated", "owner/whole@v9", "owner/dataset", "owner/mixture", "owner/pickled", "runs/a/b"]
        errors = fetch(hub, tmp_path, *names)
        requests = "\n".join(hub.requests)
    for name, message in zip(
        names,
        (
            f"owner/nothing is no folder here and no model on {hub.url} (if it is private: run `hf auth login`)",
            f"owner/gated is gated: accept its terms on {hub.url}/owner/gated, then run `hf auth login`",
            f"owner/whole on {hub.url} has no revision v9",
            f"owner/dataset on {hub.url} has no config.json: it is no model for transformers",
            "model_type=mixtral is not supported, only gpt2, llama, mistral, qwen2, qwen3",
            "model.safetensors is missing: fetch it, or choose a model that has it (other formats are not read)",
            f"runs/a/b does not exist here, and is no name of a model on {hub.url} (owner/model)",
        ),
        strict=True,
    ):
        assert isinstance(errors[name], str) and "\n" not in errors[name] and message in errors[name]
    assert "mixture/resolve" in requests and "model.safetensors" not in requests  # refused before a weight was fetched


@pytest.mark.parametrize("silent", [True, False])
def test_without_a_network_it_takes_seconds_to_say_so(silent, tmp_path):
    started = time.monotonic()
    with serve(Hub(tmp_path, silent={"owner/any"})) as hub:
        if silent:  # accepts the connection and never answers
            error = fetch(hub, tmp_path, "owner/any")
    if not silent:
        error = fetch(hub, tmp_path, "owner/any")
    assert time.monotonic() - started < 30
    assert error["owner/any"].endswith(f"{hub.url} does not answer: check it, or try later")


def test_a_busy_hub_is_asked_again(models, tmp_path):
    with serve(Hub(models, failing={"/owner/whole/resolve/main/config.json": 2})) as hub:
        folder, _ = fetch(hub, tmp_path, "owner/whole")["owner/whole"]
        assert Path(folder).is_dir()


@pytest.mark.slow
def test_a_hub_that_stays_busy_is_left_for_the_cache(models, tmp_path):
    with serve(Hub(models)) as hub:
        first = fetch(hub, tmp_path, "owner/whole")
    started = time.monotonic()
    with serve(Hub(models, failing={"/owner/whole/resolve/main/config.json": 1000})) as hub:
        again = fetch(hub, tmp_path, "owner/whole")
        other = fetch(hub, tmp_path / "elsewhere", "owner/whole")
    assert time.monotonic() - started < 60  # half a minute each
    assert first == again
    assert other["owner/whole"].endswith(
        f"not in the hub's cache, and {hub.url} is busy (it answers 503): check it, or try later"
    )


@pytest.mark.slow
def test_a_hub_that_is_busy_half_way_is_given_up_within_half_a_minute(models, tmp_path):
    with serve(Hub(models, failing={f"/owner/whole/resolve/{COMMIT}/model.safetensors": 1000})) as hub:
        started = time.monotonic()
        error = fetch(hub, tmp_path, "owner/whole")["owner/whole"]
        print(f"{time.monotonic() - started:.1f} s: {error}")
    assert time.monotonic() - started < 40  # with the start of the process
    assert error.endswith(f"{hub.url} broke off: check it, or try later")
