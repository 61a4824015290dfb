"""Small models whose attention and scores are sharp, as those of trained models are."""

import torch

from data.tokenizer import TokenizerConfig, build_tokenizer
from model import ModelConfig, Transformer

POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "none")
BYTES = build_tokenizer(TokenizerConfig(name="bytes"), list)
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}  # key heads for four query heads


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    sizes = {"vocab_size": 50, "context_length": 16, "n_layers": 2, "n_heads": 4, "d_model": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(ModelConfig(**{**sizes, **changes}))
        with torch.no_grad():
            for block in model.blocks:  # scores of several units: a new model's attention is nearly uniform
                block.attention.qkv.weight.mul_(12)
                block.attention.out.weight.mul_(12)
            model.embed.weight.mul_(12)
            if not model.config.tie_embeddings:
                model.head.weight.mul_(12)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)  # a new model's are 0, and would not be missed
    return model.to(dtype).eval()


def random_ids(rows: int, length: int, vocab_size: int = 50, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def successor_model(text: bytes, vocab_size: int = 257, context_length: int = 64, end: int | None = None) -> Transformer:
    """A model that is certain of the next byte: each byte of `text` (which repeats none) is followed by the next, the last
    one by `end`, if given, else by the first."""
    assert len(set(text)) == len(text)
    config = ModelConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        n_layers=1,
        n_heads=1,
        d_model=vocab_size,
        position="none",
        d_ff=8,
        zero_init=True,
        tie_embeddings=False,
    )
    model = Transformer(config).eval()
    follows = dict(zip(text, [*text[1:], text[0] if end is None else end], strict=True))
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(vocab_size))
        model.head.weight.zero_()
        for byte, successor in follows.items():
            model.head.weight[successor, byte] = 10.0
    return model
