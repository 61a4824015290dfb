"""Processes that run `python train.py ...` and can be killed, without the seconds that its imports take: one process makes them
and forks the others."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def ask(self, request: object) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *arguments: str, err: Path = Path(os.devnull)) -> int:
        """The id of a process that runs train.py with these arguments, in a process group of its own."""
        return self.ask({"arguments": arguments, "err": str(err)})

    def ended(self, child: int) -> int:
        """Waits for it; its exit status, or minus the signal that ended it."""
        return self.ask({"child": child})


def become(arguments: list[str], err: str) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though nohup may have started the tests
    for descriptor, path in ((0, os.devnull), (1, os.devnull), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = ["train.py", *arguments]
    train.main()


if __name__ == "__main__":
    import torch._inductor  # noqa: F401  # what a run would import: here, not in the tests that talk to this process

    import train

    train.load_libraries(train.TrainConfig().wandb)

    for line in sys.stdin:
        request = json.loads(line)
        if "child" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["child"], 0)[1])
        elif (answer := os.fork()) == 0:
            become(**request)
            sys.exit()
        print(answer, flush=True)
