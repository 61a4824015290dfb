"""Small random models made by `transformers`, in its own format: what ours are compared with."""

from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

SMALL = {
    "vocab_size": 60,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {"vocab_size": 60, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2 untied, other width, eps and gelu": GPT2Config(
        **GPT2,
        n_inner=30,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
        activation_function="gelu_pytorch_tanh",
    ),
    "llama": LlamaConfig(**SMALL),
    "llama tied, one head each": LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama head_dim, theta, eps": LlamaConfig(
        **SMALL, head_dim=10, rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 300.0}
    ),
    "llama 3 rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama attention bias": LlamaConfig(**SMALL, attention_bias=True),
    "llama mlp bias": LlamaConfig(**SMALL, mlp_bias=True),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=8),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "qwen3 tied, bias": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


def random_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """All weights random and large, biases and norms too, so that no term of the computation is close to nothing."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 if parameter.dim() == 1 else 2 / parameter.size(-1) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def save_random(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> PreTrainedModel:
    model = random_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def greedy(model: PreTrainedModel, prompt: torch.Tensor, n: int, **options: object) -> list[list[int]]:
    """The n ids that transformers puts after each prompt (b, t), unless end-of-text comes before."""
    seen = torch.ones_like(prompt)
    ids = model.generate(prompt, attention_mask=seen, max_new_tokens=n, do_sample=False, **options)
    return ids[:, prompt.size(1) :].tolist()
