"""The layers of the model on a CPU, in the compiled loops of kernels/: one call a step.

In bfloat16, weights, KV and what enters a product are bfloat16; all that is summed up is float32.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from ctypes import addressof, byref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix import native
from replicas.radix.attention import Batch, Span
from replicas.radix.config import ModelConfig
from replicas.radix.kv import KvPool
from replicas.radix.native import GATED, LARGEST_BLOCK, MULTIPLE, SET, Kernels
from replicas.radix.native_memory import Arena
from replicas.radix.weights import Layer, Projection, Weights

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
    """A projection whose weights lie as the kernels read them: [rows, in] to float32 [rows, out].

    Gated, it is to [rows, out / 2] in the dtype of the rows. Weights that came as bfloat16 stay so
    for float32 rows, too, and are widened in registers: products are exact all the same, and half
    as much is read.
    """

    product: Callable[..., Any]
    panels: Tensor  # [out / panel, in / step, panel, step], the last panel filled up with zeros
    out: int
    bias: Tensor | None
    gated: bool
    widened: bool

    @staticmethod
    def of(
        kernels: Kernels,
        arena: Arena,
        dtype: torch.dtype,
        weight: Tensor,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> "PackedLinear":
        """Pack a weight [out, in] for rows of `dtype`."""
        out, width = weight.shape
        narrow = torch.bfloat16 in (dtype, weight.dtype)
        widened = narrow and dtype == torch.float32
        step = 2 if dtype == torch.bfloat16 else 1
        weight = weight.bfloat16() if narrow else weight.float()
        if gated:  # a vector of gates, then one of what they gate
            weight = weight.view(2, -1, kernels.panel // 2, width).transpose(0, 1)
            weight = weight.reshape(out, width)
        padded = F.pad(weight, (0, 0, 0, -out % kernels.panel))
        panels = padded.view(-1, kernels.panel, width // step, step).transpose(1, 2)
        product = kernels.function("product", "widened" if widened else kind(dtype))
        wide = None if bias is None else bias.float()
        return PackedLinear(product, arena.copy(panels), out, wide, gated, widened)

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if self.gated:
            out = torch.empty(rows, self.out // 2, dtype=x.dtype)
        else:
            out = torch.empty(rows, self.out)
        mode = GATED if self.gated else SET
        panels = self.panels.data_ptr()
        self.product(x.data_ptr(), rows, width, panels, out.data_ptr(), self.out, mode)
        return out if self.bias is None else out.add_(self.bias)


class NativeOps:
    """Implements `replicas.radix.ops.Ops`. Everything is contiguous."""

    def __init__(
        self, kernels: Kernels, config: ModelConfig, weights: Weights, pool: KvPool
    ) -> None:
        self._layers = kernels.function("layers", kind(pool.dtype))
        self._panel = kernels.panel
        self._config = config
        self._pool = pool
        self._held = weights  # the pointers are into these, and into the pool
        self._table = (native.Layer * config.layers)(
            *(_layer(*parts) for parts in zip(weights.layers, pool.keys, pool.values, strict=True))
        )
        self._model = native.Model(
            addressof(self._table),
            weights.norm.data_ptr(),
            config.layers,
            config.hidden_size,
            config.intermediate_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
            pool.block_size,
            config.norm_eps,
        )

    def layers(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor, wanted: Tensor) -> Tensor:
        config, dtype = self._config, self._pool.dtype
        rows, dim = len(x), config.head_dim
        singles = [span for span in batch.spans if span.rows == 1]
        chunks = batch.spans[len(singles) :]
        pieces = cut(singles, self._pool.block_size, torch.get_num_threads())
        longest = max((span.context for span in chunks), default=0)
        tokens = longest + -longest % self._panel
        normed = torch.empty(x.shape, dtype=dtype)
        held = (  # until the call is over
            x,
            cos,
            sin,
            batch.slots,
            batch.tables,
            torch.tensor([span.table for span in singles], dtype=torch.int64),
            torch.tensor([span.context for span in singles], dtype=torch.int64),
            pieces,
            torch.tensor([(c.row, c.rows, c.position, c.table) for c in chunks]),
            wanted,
            torch.empty(rows, config.heads + 2 * config.kv_heads, dim),
            torch.empty(len(pieces), config.heads, dim + 2),
            torch.empty(rows, config.heads, dim, dtype=dtype),
            torch.empty(rows, config.intermediate_size, dtype=dtype),
            torch.empty(2, tokens, config.kv_heads, dim, dtype=dtype),
            normed,
        )
        pointers = [tensor.data_ptr() for tensor in held]
        step = native.Step(
            rows,
            *pointers[:8],
            len(pieces),
            pointers[8],
            len(chunks),
            pointers[9],
            len(wanted),
            *pointers[10:],
        )
        self._layers(byref(self._model), byref(step))
        return normed[: len(wanted)]


def cut(singles: Seq[Span], block_size: int, threads: int) -> Tensor:
    """What single tokens attend to, in pieces of about one size: [pieces, 3], of (row, first block,
    end)."""
    total = sum(span.blocks for span in singles)
    size = max(1, LEAST // block_size, -(-total // (PIECES * threads)))
    cuts = [
        (row, span.blocks * i // n, span.blocks * (i + 1) // n)
        for row, span in enumerate(singles)
        for n in (-(-span.blocks // size),)
        for i in range(n)
    ]
    return torch.tensor(cuts, dtype=torch.int64)


def kind(dtype: torch.dtype) -> str:
    """What the names of the kernels for `dtype` end with."""
    return str(dtype).removeprefix("torch.")


def _layer(layer: Layer, keys: Tensor, values: Tensor) -> native.Layer:
    return native.Layer(
        layer.attention_norm.data_ptr(),
        _address(_packed(layer.qkv).bias),
        _address(layer.q_norm),
        _address(layer.k_norm),
        layer.mlp_norm.data_ptr(),
        *(
            native.Projection(_packed(p).panels.data_ptr(), _packed(p).widened)
            for p in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        ),
        keys.data_ptr(),
        values.data_ptr(),
    )


def _packed(projection: Projection) -> PackedLinear:
    assert isinstance(projection, PackedLinear)
    return projection


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
