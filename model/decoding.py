"""The step that writes one more token a row, compiled: a block becomes a few kernels instead of some fifty calls.

A model of a few blocks is compiled whole; of a deep one a few blocks, once, and the others run the same program. It serves
every length and room of the cache (both are dynamic), follows the weights wherever training takes them (they are arguments,
not constants), and is kept on disk for the next process.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.cache import BLOCK, KVCache, LayerCache
from model.positions import Position
from model.transformer import Block, Transformer, run_blocks

SHALLOW = 6  # blocks at most of a model that is compiled whole
AT_ONCE = 4  # blocks at most of a deeper one's program: a call costs some 0.3 ms on a CPU, a block more to compile some 4 s

# What several numbers are read for is stored, not computed anew wherever it is used: else a product would normalise the row
# that it multiplies once for each column. (For a GPU, whose launches this adds to, it was not measured.)
OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"realize_acc_reads_threshold": 2}}


class Compiled:
    """`model(tokens, cache)` for one token a row: (b, 1) -> (b, 1, vocab).

    What cannot be compiled is run as it is, after a warning that says why.
    """

    def __init__(self, model: Transformer, kv: KVCache):
        self.model, self.kv = model, kv
        device = kv.lengths.device.type
        self.step = compiled(whole_step, device) if len(model.blocks) <= SHALLOW else partial(step_in_parts, device)
        self.checked = self.failed = False
        for layer in kv.layers:
            torch._dynamo.mark_dynamic(layer.keys, 2)
            torch._dynamo.mark_dynamic(layer.values, 2)

    def __call__(self, tokens: Tensor) -> Tensor:
        at, mask = self.model.place(1, self.kv)
        if self.failed or mask is None:  # without a mask there is no past to read
            return self.model(tokens, self.kv)
        # Unbacked, not just dynamic: else a read that fills all the room would be a case of its own.
        torch._dynamo.decorators.mark_unbacked(mask, mask.dim() - 1)
        try:
            # Whether a program fits this model (its guards) is looked at when a text begins: that takes as long as a small block.
            with torch.compiler.set_stance(skip_guard_eval_unsafe=self.checked):
                logits = self.step(self.model, tokens, at, mask, self.kv.layers)
        except RuntimeError as error:  # the kinds that torch.compile raises
            self.failed = True
            warnings.warn(f"decoding could not be compiled and goes on without: {why(error)}", stacklevel=2)
            return self.model(tokens, self.kv)
        self.checked = True
        self.kv.advance(1)
        return logits


def why(error: BaseException) -> str:
    """The first line of torch.compile's error that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)


def warm_up(model: Transformer, rows: int) -> float | None:
    """Compile the step of a model in eval mode for so many rows, now: the seconds it took, or None if it cannot be compiled."""
    started, kv = time.perf_counter(), model.new_cache(rows, 2 * BLOCK)
    step = Compiled(model, kv)
    kv.advance(min(1, model.config.context_length - 1))
    with torch.no_grad():
        step(torch.zeros(rows, 1, dtype=torch.long, device=kv.lengths.device))
    return None if step.failed else time.perf_counter() - started


@cache
def compiled(part: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """One for the process; torch keeps a program for every structure, dtype and number of rows that it meets."""
    return torch.compile(part, fullgraph=True, dynamic=False, options=OPTIONS.get(device))


def whole_step(model: Transformer, tokens: Tensor, at: Tensor, mask: Tensor, layers: Sequence[LayerCache]) -> Tensor:
    with OneToken():
        return model.head(model.transform(tokens, at, mask, layers))


def step_in_parts(
    device: str, model: Transformer, tokens: Tensor, at: Tensor, mask: Tensor, layers: Sequence[LayerCache]
) -> Tensor:
    def run(
        blocks: Sequence[Block], x: Tensor, position: Position, at: Tensor, mask: Tensor, layers: Sequence[LayerCache]
    ) -> Tensor:
        n = max(n for n in range(1, AT_ONCE + 1) if len(blocks) % n == 0)
        for first in range(0, len(blocks), n):
            part = slice(first, first + n)
            x = compiled(some_blocks, device)(list(blocks)[part], x, position, at, mask, layers[part])
        return x

    return compiled(run_head, device)(model, model.transform(tokens, at, mask, layers, run))


def some_blocks(*inputs: Any) -> Tensor:
    with OneToken():
        return run_blocks(*inputs)


def run_head(model: Transformer, x: Tensor) -> Tensor:
    with OneToken():
        return model.head(x)


class OneToken(TorchFunctionMode):
    """Writes a row's products as multiply and reduce. One token uses each weight that it reads once, so memory sets the pace;
    such loops the compiler vectorises and fuses with what surrounds them; a library's kernels are made to save arithmetic."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[0].numel() == args[0].size(-1):  # several rows share what is read: a library's case
            func = matrix_vector
        elif func is F.scaled_dot_product_attention:
            narrow = args[0].device.type == "cpu" and args[0].element_size() < 4  # where a CPU's kernel may be slow
            func = written_out if narrow else torch.ops.sprout.attention
            return func(*args, kwargs["attn_mask"])
        return func(*args, **(kwargs or {}))


def matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of a single row, summed in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.to(wide).unsqueeze(-2) * weight.to(wide)).sum(dim=-1)
    return (y if bias is None else y + bias).to(x.dtype)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v: q (..., t, d) with a small t, k and v (..., s, d), summed in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide).unsqueeze(-2) * k.to(wide).unsqueeze(-3)).sum(dim=-1) / q.size(-1) ** 0.5
    weights = (scores + mask).softmax(dim=-1)
    return (weights.unsqueeze(-1) * v.to(wide).unsqueeze(-3)).sum(dim=-2).to(q.dtype)


OPERATORS = torch.library.Library("sprout", "DEF")  # (torch.library.custom_op takes 0.1 ms a call)
OPERATORS.define("attention(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor")


@torch.library.impl(OPERATORS, "attention", "CompositeExplicitAutograd")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The library's kernel, which the compiler calls and does not look into: q (b, h, t, d), k and v (b, h, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).contiguous()


@torch.library.register_fake("sprout::attention", lib=OPERATORS)
def shape_of_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
