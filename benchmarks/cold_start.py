"""How long a user of sample.py waits: for `--help`, and for the default model's first token, each in a new process.

`python -m benchmarks.cold_start`.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.decode import SHAPES
from benchmarks.harness import as_row, interleave, store
from data.tokenizer import TokenizerConfig, build_tokenizer
from model import ModelConfig, Transformer
from weights import checkpoint


def call(*arguments: str) -> None:
    subprocess.run([sys.executable, "sample.py", *arguments], check=True, capture_output=True)


def main() -> None:
    model = Transformer(ModelConfig(**SHAPES["default"]))
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), list)
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "checkpoint"
        checkpoint.save(saved, model.config, model.state_dict(), tokenizer, trainer={}, about={})
        first = ("--checkpoint", str(saved), "--prompt", "def ", "--max-new-tokens", "1")
        timings = interleave({"--help": lambda: call("--help"), "first token": lambda: call(*first)}, turns=5)
    row = as_row({}, timings, "first token")
    print(row)
    print(store("cold_start", [row]))


if __name__ == "__main__":
    main()
