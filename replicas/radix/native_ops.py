"""The same operations as `replicas.radix.ops`, in the compiled loops of kernels.c."""

from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.radix.attention import Batch
from replicas.radix.config import ModelConfig
from replicas.radix.kv import KvPool
from replicas.radix.native import PANEL, SPAN
from replicas.radix.weights import Layer

VECTOR = 8  # floats


def fits(config: ModelConfig, block_size: int) -> bool:
    """Whether the sizes of a model are those that the kernels are written for."""
    projections = (
        config.hidden_size,
        config.intermediate_size,
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.vocab_size,
    )
    return (
        all(size % PANEL == 0 for size in projections)
        and config.head_dim % (2 * VECTOR) == 0
        and block_size <= SPAN
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A projection [rows, in] to [rows, out] whose weights lie as the kernels read them.

    Weights that came as bfloat16 stay so, and are widened in registers: products are exact all the
    same, and half as much is read.
    """

    kernels: CDLL
    panels: Tensor  # [out / PANEL, in, PANEL], bfloat16 or float32
    bias: Tensor | None

    @staticmethod
    def of(library: CDLL, weight: Tensor, bias: Tensor | None) -> "PackedLinear":
        """Pack a weight [out, in]; what is not bfloat16 becomes float32."""
        out, width = weight.shape
        narrow = weight if weight.dtype == torch.bfloat16 else weight.float()
        panels = narrow.view(out // PANEL, PANEL, width).transpose(1, 2).contiguous()
        return PackedLinear(library, panels, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        count, width, _ = self.panels.shape
        out = torch.empty(len(x), count * PANEL)
        narrow = self.panels.dtype == torch.bfloat16
        product = self.kernels.product_bfloat16 if narrow else self.kernels.product_float32
        panels = self.panels.data_ptr()
        product(x.data_ptr(), len(x), width, panels, out.data_ptr(), count * PANEL)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """How the rows of a step attend: single tokens first, then longer chunks one by one."""

    singles: int
    tables: Tensor  # int64, the block tables of all chunks one behind the other
    starts: Tensor  # [singles] where each single's table begins
    contexts: Tensor  # [singles] tokens
    pieces: int  # that a single's context is cut into
    partial: Tensor  # scratch of `attend`
    chunks: tuple[tuple[int, int, int, int], ...]  # (row, rows, first position, start of table)


class NativeOps:
    """Implements `replicas.radix.ops.Ops`. Everything is float32 and contiguous."""

    def __init__(self, library: CDLL, config: ModelConfig, pool: KvPool) -> None:
        self._library = library
        self._config = config
        self._pool = pool
        self._width = config.heads + 2 * config.kv_heads

    def prepare(self, batch: Batch) -> NativePlan:
        config = self._config
        singles = [span for span in batch.spans if span.rows == 1]
        pieces = -(-2 * torch.get_num_threads() // max(1, len(singles) * config.kv_heads))
        group = config.heads // config.kv_heads
        record = config.kv_heads * pieces * group * (config.head_dim + 2)
        return NativePlan(
            singles=len(singles),
            tables=batch.tables,
            starts=torch.tensor([span.table for span in singles], dtype=torch.int64),
            contexts=torch.tensor([span.position + 1 for span in singles], dtype=torch.int64),
            pieces=pieces,
            partial=torch.empty(len(singles) * record),
            chunks=tuple(
                (span.row, span.rows, span.position, span.table)
                for span in batch.spans[len(singles) :]
            ),
        )

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._library.add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            self._config.norm_eps,
            out.data_ptr(),
            *x.shape,
        )
        return out

    def rotate_and_store(
        self, qkv: Tensor, index: int, layer: Layer, batch: Batch, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self._config
        self._library.rotate_and_store(
            qkv.data_ptr(),
            None if layer.q_norm is None else layer.q_norm.data_ptr(),
            None if layer.k_norm is None else layer.k_norm.data_ptr(),
            config.norm_eps,
            cos.data_ptr(),
            sin.data_ptr(),
            batch.slots.data_ptr(),
            self._pool.keys[index].data_ptr(),
            self._pool.values[index].data_ptr(),
            len(qkv),
            config.heads,
            config.kv_heads,
            config.head_dim,
        )
        return qkv

    def attend(self, qkv: Tensor, index: int, plan: NativePlan) -> Tensor:
        config, pool = self._config, self._pool
        keys, values = pool.keys[index].data_ptr(), pool.values[index].data_ptr()
        shape = (config.heads, config.kv_heads, config.head_dim, pool.block_size)
        scale = config.head_dim**-0.5
        out = torch.empty(len(qkv), config.heads * config.head_dim)
        if plan.singles:
            self._library.attend(
                qkv.data_ptr(),
                self._width,
                keys,
                values,
                plan.tables.data_ptr(),
                plan.starts.data_ptr(),
                plan.contexts.data_ptr(),
                out.data_ptr(),
                plan.partial.data_ptr(),
                plan.singles,
                *shape,
                plan.pieces,
                scale,
            )
        for row, rows, position, table in plan.chunks:
            self._library.attend_chunk(
                qkv[row].data_ptr(),
                self._width,
                keys,
                values,
                plan.tables[table:].data_ptr(),
                out[row].data_ptr(),
                rows,
                position,
                *shape,
                scale,
            )
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2)
        self._library.swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
