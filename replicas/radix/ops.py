"""What a decoder layer does between its matrix products, in PyTorch: any device, any dtype.

`replicas.radix.native_ops` does the same on a CPU, in compiled loops.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.attention import Batch, Plan, attend, plan_attention
from replicas.radix.config import ModelConfig
from replicas.radix.kv import KvPool
from replicas.radix.weights import Layer


class Ops(Protocol):
    """Rows are the tokens of a step. `x` is the residual stream, [rows, hidden]."""

    def prepare(self, batch: Batch) -> Any:
        """What `attend` needs to know of a step, computed once for all layers."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `x` in place; the root mean square norm of the sum, in float32 (Zhang and
        Sennrich, 2019)."""

    def rotate_and_store(
        self, qkv: Tensor, index: int, layer: Layer, batch: Batch, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Rotate queries and keys, and put keys and values of layer `index` into the pool.

        qkv is [rows, heads + 2 * kv_heads, head_dim], cos and sin [rows, head_dim / 2]. Returns qkv
        with what is rotated, which may be the same memory.
        """

    def attend(self, qkv: Tensor, index: int, plan: Any) -> Tensor:
        """Causal attention of all rows over their block tables: [rows, heads * head_dim]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [rows, 2 * inner] to [rows, inner]."""


class TorchOps:
    """Implements `Ops`."""

    def __init__(self, config: ModelConfig, pool: KvPool) -> None:
        self._config = config
        self._pool = pool
        self._heads = [config.heads, config.kv_heads, config.kv_heads]

    def prepare(self, batch: Batch) -> Plan:
        return plan_attention(batch, self._pool)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        if delta is not None:
            x += delta
        return _rms_norm(x, weight, self._config.norm_eps)

    def rotate_and_store(
        self, qkv: Tensor, index: int, layer: Layer, batch: Batch, cos: Tensor, sin: Tensor
    ) -> Tensor:
        queries, keys, values = torch.split(qkv, self._heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = _rms_norm(queries, layer.q_norm, self._config.norm_eps)
            keys = _rms_norm(keys, layer.k_norm, self._config.norm_eps)
        cos, sin = cos[:, None].to(qkv.dtype), sin[:, None].to(qkv.dtype)
        queries, keys = (_rotate(x, cos, sin) for x in (queries, keys))
        self._pool.write(index, batch.slots, keys, values)
        return torch.cat((queries, keys, values), dim=1)

    def attend(self, qkv: Tensor, index: int, plan: Plan) -> Tensor:
        queries, keys, values = torch.split(qkv, self._heads, dim=1)
        return attend(queries, keys, values, index, plan, self._pool)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
