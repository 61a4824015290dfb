"""One training step, ours against the same architecture in transformers: forward, backward, clip, AdamW.

`python -m benchmarks.train_step`. Same shapes, same batch, same dtype (float32), same optimizer settings.
"""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.harness import as_row, interleave, store
from model import ModelConfig, Transformer
from training.objective import NextTokenLoss
from training.optimizer import OptimizerConfig, clip_gradients, make_optimizer

SHAPES = {  # name: (layers, heads, d_model, d_ff, vocab, context, batch)
    "default": (4, 4, 192, 512, 4096, 256, 8),
    "small, long head": (4, 4, 256, 704, 32000, 128, 8),
}


def ours(shape: tuple[int, ...]) -> Callable[[], None]:
    n_layers, n_heads, d_model, d_ff, vocab, context, batch = shape
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=vocab, context_length=context, n_layers=n_layers, n_heads=n_heads, d_model=d_model, d_ff=d_ff)
    )
    objective = NextTokenLoss(model)
    optimizer = make_optimizer(OptimizerConfig(), model)
    ids = torch.randint(0, vocab, (batch, context + 1))

    def step() -> None:
        loss, n = objective(ids[:, :-1], ids[:, 1:])
        (loss / n).backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def theirs(shape: tuple[int, ...]) -> Callable[[], None]:
    n_layers, n_heads, d_model, d_ff, vocab, context, batch = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        max_position_embeddings=context,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        hidden_size=d_model,
        intermediate_size=d_ff,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, vocab, (batch, context + 1))

    def step() -> None:
        model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    rows = []
    for name, shape in SHAPES.items():
        timings = interleave({"transformers": theirs(shape), "sprout": ours(shape)})
        row = as_row({"shape": name, "layers, heads, d_model, d_ff, vocab, context, batch": shape}, timings, "transformers")
        print(name, row["times as fast as transformers"])
        rows.append(row)
    print(store("train_step", rows))


if __name__ == "__main__":
    main()
