"""The layers of the model in PyTorch: any device, any dtype.

`replicas.radix.native_ops` computes the same on a CPU, in compiled loops.
"""

from typing import Protocol

import torch
from torch import Tensor

from replicas.radix.attention import Batch, attend, plan_attention
from replicas.radix.config import ModelConfig
from replicas.radix.kv import KvPool
from replicas.radix.weights import Layer, Weights


class Ops(Protocol):
    """What computes the layers."""

    def layers(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor, wanted: Tensor) -> Tensor:
        """All decoder layers and the last norm, of x [rows, hidden], which may be overwritten; cos
        and sin are [rows, head_dim / 2]. Puts the rows' keys and values into the pool. Returns
        the rows `wanted` [any], in ascending order: the last layer computes no others."""


class TorchOps:
    """Implements `Ops`."""

    def __init__(self, config: ModelConfig, weights: Weights, pool: KvPool) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        self._heads = [config.heads, config.kv_heads, config.kv_heads]

    def layers(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor, wanted: Tensor) -> Tensor:
        eps, plan = self._config.norm_eps, plan_attention(batch, self._pool)
        for index, layer in enumerate(self._weights.layers):
            # heads are the middle dimension: [rows, heads + 2 * kv_heads, head_dim]
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, eps))
            qkv = qkv.view(len(x), -1, self._config.head_dim)
            queries, keys, values = self.rotate_and_store(qkv, index, layer, batch, cos, sin)
            attended = attend(queries, keys, values, index, plan, self._pool)
            if index == self._config.layers - 1:
                attended, x = attended[wanted], x[wanted]
            x += layer.attention_out(attended)
            x += layer.down(layer.gate_up(rms_norm(x, layer.mlp_norm, eps)))
        return rms_norm(x, self._weights.norm, eps)

    def rotate_and_store(
        self, qkv: Tensor, index: int, layer: Layer, batch: Batch, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys, and put keys and values of layer `index` into the pool."""
        queries, keys, values = torch.split(qkv, self._heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = rms_norm(queries, layer.q_norm, self._config.norm_eps)
            keys = rms_norm(keys, layer.k_norm, self._config.norm_eps)
        cos, sin = cos[:, None].to(qkv.dtype), sin[:, None].to(qkv.dtype)
        queries, keys = (_rotate(x, cos, sin) for x in (queries, keys))
        self._pool.write(index, batch.slots, keys, values)
        return queries, keys, values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
