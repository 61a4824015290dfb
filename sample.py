"""A checkpoint and a prompt -> text: `python sample.py --prompt "def "`, and `--help` for all that can be asked."""

import argparse
import gc
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

# What needs torch is imported by the functions that use it: --help and mistyped arguments answer at once.
if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model import Sampling, Transformer

INTERRUPTED = 130  # as shells count: 128 + SIGINT


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sample.py",
        usage="%(prog)s [--prompt TEXT] [options]",
        description="Continue a prompt. The text goes to stdout, everything else to stderr.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", metavar="TEXT", help="default: stdin; if that is a terminal or empty, a new text begins")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file (UTF-8, taken as it is)")
    add("--special", action="store_true", help="the prompt may spell control tokens, as chat models want; else they are text")
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", metavar="PATH", help="a run, a checkpoint, a Hugging Face folder or hub name; default: the newest run")
    add("--device", default="auto", help="auto (default), cuda, cuda:1, mps or cpu")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="auto (default): the checkpoint's")
    add("--compile", action="store_true", help="compile the decoding step first: pays for long texts")
    add("--no-cache", action="store_true", help="read the whole text again for each token: the same text, slowly")
    add = parser.add_argument_group("sampling").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=200, help="default: %(default)s")
    add("--temperature", metavar="T", type=float, default=0.8, help="0: the best token; 1: its own odds; default: %(default)s")
    add("--top-k", metavar="K", type=int, default=50, help="draw among the K best; 0: off; default: %(default)s")
    add("--top-p", metavar="P", type=float, default=1.0, help="draw among the best with P of the probability; 1: off (default)")
    add("--min-p", metavar="P", type=float, default=0.0, help="drop those below P times the best's odds; 0: off (default)")
    add("--repetition-penalty", metavar="R", type=float, default=1.0, help="above 1, repeats get less likely; 1: off (default)")
    add("--seed", metavar="S", type=int, default=0, help="the same seed writes the same text; default: %(default)s")
    add("--num-samples", metavar="N", type=int, default=1, help="write N texts, with the seeds S, S + 1, ...; default: 1")
    add("--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given several times")
    add("--overflow", choices=("slide", "stop"), default="slide", help="full context: go on with its last half (default), or end")
    add = parser.add_argument_group("output").add_argument
    add("--no-stream", action="store_true", help="print the text when it is complete")
    add("--logprobs", metavar="N", type=int, nargs="?", const=3, help="list each token's probability and N others (3), on stderr")
    add("--attention-map", metavar="FILE", help="draw where each head looks in the prompt (.png, .svg, .pdf)")
    add("--attention-layer", metavar="N", type=int, help="draw this layer only, counted from 0")
    args = parser.parse_args(joined(arguments))
    if args.prompt is not None and args.prompt_file is not None:
        parser.error("--prompt and --prompt-file are two prompts: give one")
    if args.compile and args.no_cache:
        parser.error("--compile is for the step that reads the cache: leave --no-cache out")
    if args.checkpoint == "":
        parser.error("--checkpoint is empty: give a path or a name, or leave it out")
    if any(text != text.encode(errors="replace").decode() for text in args.stop):
        parser.error("--stop is not UTF-8, and no text could ever hold it")
    if args.num_samples < 1:
        parser.error(f"--num-samples={args.num_samples} must be at least 1")
    if args.logprobs is not None and args.logprobs < 0:
        parser.error(f"--logprobs={args.logprobs} must be at least 0")
    return args


def joined(arguments: list[str]) -> list[str]:
    """`--prompt -x` as `--prompt=-x`: what follows these options is text, even if it begins with a dash."""
    rest = iter(arguments)
    return [f"{a}={b}" if a in ("--prompt", "--stop") and (b := next(rest, None)) is not None else a for a in rest]


def read_prompt(args: argparse.Namespace) -> str:
    """Raises ValueError for bytes that are not UTF-8: no model has learned what a guess at them would give."""
    if args.prompt is not None:
        source, raw = "--prompt", os.fsencode(args.prompt)
    elif args.prompt_file is not None:
        source, raw = args.prompt_file, Path(args.prompt_file).read_bytes()
    elif sys.stdin is None or sys.stdin.isatty():
        source, raw = "stdin", b""
    else:
        source, raw = "stdin", sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        at = error.start
        raise ValueError(f"{source}: byte {at} of the prompt, 0x{raw[at]:02x}, is not UTF-8: convert the text first") from None


def load_model(args: argparse.Namespace) -> "tuple[Transformer, Tokenizer]":
    from training.device import choose_device, choose_dtype
    from weights import checkpoint, load

    device = choose_device(args.device)
    dtype = None if args.dtype == "auto" else choose_dtype(args.dtype, device)
    model, tokenizer = load(args.checkpoint or checkpoint.newest(), device, dtype)
    choose_dtype(str(model.embed.weight.dtype).removeprefix("torch."), device)  # refuses a float16 checkpoint on a CPU
    return model, tokenizer


def draw_attention(args: argparse.Namespace, model: "Transformer", tokenizer: "Tokenizer", prompt: str) -> None:
    from sampling.attention_map import attention_figure, attention_weights
    from sampling.text import prompt_ids, spell

    ids = prompt_ids(tokenizer, prompt, args.special)[-model.config.context_length :]
    weights, first = attention_weights(model, ids), 0
    if args.attention_layer is not None:
        if not 0 <= args.attention_layer < len(weights):
            raise ValueError(f"--attention-layer={args.attention_layer} is not one of 0 to {len(weights) - 1}")
        first = args.attention_layer
        weights = [weights[first]]
    attention_figure(weights, [spell(tokenizer, token).replace(" ", "␣") for token in ids], first).savefig(args.attention_map)
    notice(f"attention over {len(ids)} tokens: {args.attention_map}")


def sample(args: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    gc.disable()  # imports make a million objects and no garbage: looking for some, now and at exit, takes 0.4 s of 2.9
    from model import Sampling

    gc.freeze()
    gc.enable()
    filters = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    sampling = Sampling(**{name: getattr(args, name) for name in filters})
    prompt = read_prompt(args)
    if not prompt:
        notice("no prompt: a new text begins")
    model, tokenizer = load_model(args)
    if args.attention_map:
        draw_attention(args, model, tokenizer, prompt)
    return print_texts(args, model, tokenizer, prompt, sampling)


def print_texts(args: argparse.Namespace, model: "Transformer", tokenizer: "Tokenizer", prompt: str, sampling: "Sampling") -> int:
    from model.decoding import warm_up
    from sampling.alternatives import HEADING, alternatives
    from sampling.text import prompt_ids, write

    rows, streamed = range(args.num_samples), args.num_samples == 1 and not args.no_stream
    options = {"stop": args.stop, "special": args.special, "overflow": args.overflow, "use_cache": not args.no_cache}
    compiling = warm_up(model, len(rows)) if args.compile else None
    if compiling is not None:
        notice(f"compiled in {compiling:.1f} s")
    options["compile"] = compiling is not None
    steps = write(model, tokenizer, [prompt for _ in rows], args.max_new_tokens, sampling=sampling, seeds=args.seed, **options)
    texts, explained = [prompt for _ in rows], [[HEADING] for _ in rows]
    status, ended = 0, []
    emit(prompt if streamed else "")
    prompt_tokens = min(len(prompt_ids(tokenizer, prompt, args.special)), model.config.context_length)
    times, counts = [time.perf_counter()], list[int]()
    with interrupts() as interrupted:
        for written in steps:
            ended = written.step.ended
            times.append(time.perf_counter())
            counts.append(sum(token is not None for token in written.step.ids))
            for r in rows:
                texts[r] += written.pieces[r]
                if args.logprobs is not None and written.step.ids[r] is not None:
                    explained[r].append(alternatives(tokenizer, written.step, r, args.logprobs))
            emit(written.pieces[0] if streamed else "")
            if interrupted:
                status = INTERRUPTED
                break
    emit("\n" if streamed else "\n---\n".join(texts) + "\n")
    if args.logprobs is not None:
        print("\n---\n".join("\n".join(lines) for lines in explained), file=sys.stderr)
    if "context" in ended:
        notice(f"the context of {model.config.context_length} tokens is full: --overflow slide goes on")
    if status == INTERRUPTED:
        notice("interrupted")
    print(speed(prompt_tokens, times, counts), file=sys.stderr)
    return status


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Notes the first SIGINT; the next one raises KeyboardInterrupt, as usual. (An exception that comes while Python cleans up
    after an object is lost; a note is not.)"""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def speed(prompt_tokens: int, times: list[float], counts: list[int]) -> str:
    """Tokens per second, of the prompt (until the first new token is there) and after it. `times`: when it began, and when each
    step was there; `counts`: its new tokens."""
    prefill = prompt_tokens / max(times[1] - times[0], 1e-9) if counts else 0
    decode = sum(counts[1:]) / max(times[-1] - times[1], 1e-9) if counts else 0
    return f"prefill {prompt_tokens} tokens, {prefill:.0f} tokens/s; decode {sum(counts[1:])} tokens, {decode:.0f} tokens/s"


def emit(text: str) -> None:
    print(text, end="", flush=True)


def notice(text: object) -> None:
    print("sample.py:", " ".join(str(text).split()), file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    args = parse(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = lambda message, *rest, **more: notice(message)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale: text is printed, not refused
    try:
        return sample(args)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
        notice("stdout was closed")
        return 141  # 128 + SIGPIPE
    except (ValueError, OSError) as error:
        notice(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        notice("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
