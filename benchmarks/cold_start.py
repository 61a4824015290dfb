"""How long a user waits before anything happens, each in a new process: for `sample.py --help`, for the default model's first
token, and for train.py's imports beside those of torch alone.

`python -m benchmarks.cold_start`.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.decode import SHAPES
from benchmarks.harness import as_row, interleave, store
from data.tokenizer import TokenizerConfig, build_tokenizer
from model import ModelConfig, Transformer
from weights import checkpoint


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def main() -> None:
    model = Transformer(ModelConfig(**SHAPES["default"]))
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), list)
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "checkpoint"
        checkpoint.save(saved, model.config, model.state_dict(), tokenizer, trainer={}, about={})
        first = ("--checkpoint", str(saved), "--prompt", "def ", "--max-new-tokens", "1")
        calls = {
            "--help": ("sample.py", "--help"),
            "first token": ("sample.py", *first),
            "import train": ("-c", "import train"),
            "import torch": ("-c", "import torch"),
        }
        timings = interleave({name: partial(python, *arguments) for name, arguments in calls.items()}, turns=7)
    row = as_row({}, timings, "first token")
    print(row)
    print(store("cold_start", [row]))


if __name__ == "__main__":
    main()
