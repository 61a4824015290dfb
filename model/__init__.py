"""The model: tensors only. It knows nothing of files, configuration or logging."""

from model.attention import MultiHeadAttention, scaled_dot_product_attention
from model.cache import KVCache
from model.config import ModelConfig
from model.generation import generate, stream
from model.sampling import Sampling
from model.transformer import Transformer

__all__ = [
    "KVCache",
    "ModelConfig",
    "MultiHeadAttention",
    "Sampling",
    "Transformer",
    "generate",
    "scaled_dot_product_attention",
    "stream",
]
