"""The forward pass of the Llama family in plain PyTorch.

Pre-norm decoder layers (Touvron et al., LLaMA, section 2.2) with RMSNorm, rotary positions, grouped
queries and SwiGLU. Qwen2 adds a bias to q, k and v; Qwen3 normalises q and k per head. Numerics
follow Hugging Face: norms and rotary angles in float32, the rest in the dtype of the weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.attention import Batch, attend
from replicas.radix.config import ModelConfig, Rope
from replicas.radix.kv import KvPool
from replicas.radix.weights import Layer, Weights


class Model:
    """Weights and the KV pool they fill; `forward` computes one step."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: KvPool) -> None:
        self.config = config
        self.weights = weights
        self.pool = pool
        self.frequencies = rope_frequencies(config.rope, config.head_dim).to(weights.norm.device)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states after the last layer, [rows, hidden]; writes the rows' KV to the pool."""
        x = F.embedding(batch.tokens, self.weights.embedding)
        angles = batch.positions[:, None].float() * self.frequencies
        cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        eps = self.config.norm_eps
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.attention_norm, eps)
            x = x + self._attention(normed, index, layer, batch, cos, sin)
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] to logits [rows, vocab], float32."""
        normed = rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        return self.weights.head(normed).float()

    def _attention(
        self, x: Tensor, index: int, layer: Layer, batch: Batch, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self.config
        heads = [config.heads, config.kv_heads]
        # Heads are the middle dimension: [rows, heads + 2 * kv_heads, head_dim].
        qkv = layer.qkv(x).view(len(x), -1, config.head_dim)
        queries_keys, values = torch.split(qkv, [sum(heads), config.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = torch.split(queries_keys, heads, dim=1)
            queries = rms_norm(queries, layer.q_norm, config.norm_eps)
            keys = rms_norm(keys, layer.k_norm, config.norm_eps)
            queries_keys = torch.cat((queries, keys), dim=1)
        queries, keys = torch.split(rotate(queries_keys, cos, sin), heads, dim=1)
        self.pool.write(index, batch.slots, keys, values)
        return layer.attention_out(attend(queries, keys, values, index, batch, self.pool))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]); cos and sin are [rows, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position turns each pair, [head_dim / 2] float32, with the scaling applied.

    llama3 leaves wavelengths shorter than original / high_freq_factor alone, divides those longer
    than original / low_freq_factor by `factor`, and blends linearly in frequency between the two.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind != "llama3":
        return frequencies / rope.factor
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)
