"""The same operations as `replicas.radix.ops`, in the compiled loops of kernels/.

In bfloat16, weights, KV and what enters a product are bfloat16; all that is summed up is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.attention import Batch
from replicas.radix.config import ModelConfig
from replicas.radix.kv import KvPool
from replicas.radix.native import LARGEST_BLOCK, MULTIPLE, Kernels
from replicas.radix.weights import Layer

PIECES = 4  # a thread has to decode with, so that threads end together
LEAST = 64  # tokens that are worth a piece of their own


def fits(config: ModelConfig, block_size: int) -> bool:
    """Whether the sizes of a model are those that the kernels are written for."""
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.vocab_size,
        config.head_dim,
    )
    return all(size % MULTIPLE == 0 for size in sizes) and block_size <= LARGEST_BLOCK


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A projection [rows, in] to float32 [rows, out] whose weights lie as the kernels read them.

    Weights that came as bfloat16 stay so for float32 rows, too, and are widened in registers:
    products are exact all the same, and half as much is read.
    """

    product: Callable[..., Any]
    panels: Tensor  # [out / panel, in / step, panel, step], the last panel filled up with zeros
    out: int
    bias: Tensor | None

    @staticmethod
    def of(
        kernels: Kernels, dtype: torch.dtype, weight: Tensor, bias: Tensor | None
    ) -> "PackedLinear":
        """Pack a weight [out, in] for rows of `dtype`."""
        out, width = weight.shape
        narrow = torch.bfloat16 in (dtype, weight.dtype)
        kind = _kind(dtype) if dtype == torch.bfloat16 or not narrow else "widened"
        step = 2 if kind == "bfloat16" else 1
        weight = weight.bfloat16() if narrow else weight.float()
        padded = F.pad(weight, (0, 0, 0, -out % kernels.panel))
        panels = padded.view(-1, kernels.panel, width // step, step).transpose(1, 2).contiguous()
        product = kernels.function("product", kind)
        return PackedLinear(product, panels, out, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, self.out)
        panels = self.panels.data_ptr()
        self.product(x.data_ptr(), rows, width, panels, out.data_ptr(), self.out)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class NativePlan:
    """How the rows of a step attend: single tokens first, then longer chunks one by one."""

    singles: int
    tables: Tensor  # int64, the block tables of all chunks one behind the other
    starts: Tensor  # [singles] where each single's table begins
    contexts: Tensor  # [singles] tokens
    pieces: Tensor  # [pieces, 3]: (row, first block, end) of what is attended to apart
    partial: Tensor  # scratch of `attend`
    chunks: tuple[tuple[int, int, int, int], ...]  # (row, rows, first position, start of table)
    packed: Tensor  # scratch of `attend_chunk`


class NativeOps:
    """Implements `replicas.radix.ops.Ops`. Everything is contiguous."""

    def __init__(self, kernels: Kernels, config: ModelConfig, pool: KvPool) -> None:
        kind = _kind(pool.dtype)
        self._add_norm = kernels.function("add_norm", kind)
        self._rotate_and_store = kernels.function("rotate_and_store", kind)
        self._attend = kernels.function("attend", kind)
        self._attend_chunk = kernels.function("attend_chunk", kind)
        self._swiglu = kernels.function("swiglu", kind)
        self._panel = kernels.panel
        self._config = config
        self._pool = pool
        self._width = config.heads + 2 * config.kv_heads

    def prepare(self, batch: Batch) -> NativePlan:
        config = self._config
        singles = [span for span in batch.spans if span.rows == 1]
        chunks = batch.spans[len(singles) :]
        pieces = self._pieces([span.blocks for span in singles])
        longest = max((span.context for span in chunks), default=0)
        tokens = longest + -longest % self._panel
        return NativePlan(
            singles=len(singles),
            tables=batch.tables,
            starts=torch.tensor([span.table for span in singles], dtype=torch.int64),
            contexts=torch.tensor([span.context for span in singles], dtype=torch.int64),
            pieces=pieces,
            partial=torch.empty(len(pieces) * config.heads * (config.head_dim + 2)),
            chunks=tuple((span.row, span.rows, span.position, span.table) for span in chunks),
            packed=torch.empty(
                2 * tokens * config.kv_heads * config.head_dim, dtype=self._pool.dtype
            ),
        )

    def _pieces(self, blocks: list[int]) -> Tensor:
        """Cut rows of so many blocks into pieces of about one size."""
        if not blocks:
            return torch.empty(0, 3, dtype=torch.int64)
        even = -(-sum(blocks) // (PIECES * torch.get_num_threads()))
        size = max(even, LEAST // self._pool.block_size)
        return torch.tensor(
            [
                (row, count * i // n, count * (i + 1) // n)
                for row, count in enumerate(blocks)
                for n in (-(-count // max(1, size)),)
                for i in range(n)
            ]
        )

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=self._pool.dtype)
        self._add_norm(
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
        self._rotate_and_store(
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
        out = torch.empty(len(qkv), config.heads * config.head_dim, dtype=pool.dtype)
        if plan.singles:
            self._attend(
                qkv.data_ptr(),
                self._width,
                keys,
                values,
                plan.tables.data_ptr(),
                plan.starts.data_ptr(),
                plan.contexts.data_ptr(),
                plan.pieces.data_ptr(),
                len(plan.pieces),
                out.data_ptr(),
                plan.partial.data_ptr(),
                *shape,
                scale,
            )
        for row, rows, position, table in plan.chunks:
            self._attend_chunk(
                qkv[row].data_ptr(),
                self._width,
                keys,
                values,
                plan.tables[table:].data_ptr(),
                plan.packed.data_ptr(),
                out[row].data_ptr(),
                rows,
                position,
                *shape,
                scale,
            )
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=self._pool.dtype)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out


def _kind(dtype: torch.dtype) -> str:
    """What the names of the kernels for `dtype` end with."""
    return str(dtype).removeprefix("torch.")
