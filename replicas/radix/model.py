"""The forward pass of the Llama family in plain PyTorch.

Pre-norm decoder layers (Touvron et al., LLaMA, section 2.2) with RMSNorm, rotary positions, grouped
queries and SwiGLU. Qwen2 adds a bias to q, k and v; Qwen3 normalises q and k per head. Numerics
follow Hugging Face: norms and rotary angles in float32, the rest in the dtype of the weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.attention import Batch
from replicas.radix.config import ModelConfig, Rope
from replicas.radix.kv import KvPool
from replicas.radix.ops import Ops
from replicas.radix.weights import Weights


class Model:
    """Weights and the KV pool they fill; `forward` computes one step."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: KvPool, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.pool = pool
        self.ops = ops
        self.frequencies = rope_frequencies(config.rope, config.head_dim).to(weights.norm.device)

    def forward(self, batch: Batch, wanted: Tensor) -> Tensor:
        """Normed hidden states after the last layer of the rows `wanted`, ascending, [wanted,
        hidden]; writes the KV of all rows to the pool."""
        x = F.embedding(batch.tokens, self.weights.embedding).to(self.weights.norm.dtype)
        angles = batch.positions[:, None].float() * self.frequencies
        return self.ops.layers(x, batch, angles.cos(), angles.sin(), wanted)

    def logits(self, normed: Tensor) -> Tensor:
        """Normed hidden states [rows, hidden] to logits [rows, vocab], float32."""
        return self.weights.head(normed).float()


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
