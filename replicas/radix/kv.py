"""The paged KV pool: keys and values of every layer, in blocks of a fixed number of tokens.

Paging as in PagedAttention (Kwon et al., SOSP 2023, section 4). Who owns a block is the tree's
business; the pool only holds what is written into it.
"""

import math
from functools import partial

import torch
from torch import Tensor

from replicas.radix.config import ModelConfig
from replicas.radix.native_memory import Arena


class KvPool:
    """Two tensors a layer, [blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises MemoryError, with one line for the user, when the device has no room."""
        sizes = (2, config.layers, blocks, block_size, config.kv_heads, config.head_dim)
        # Zeros, not empty: masked positions still multiply, and 0 * NaN is NaN.
        zeros = Arena().zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        try:  # all at once: layer by layer, a system grants more than it has
            keys, values = zeros(sizes, dtype=dtype)
        except (MemoryError, OSError, OverflowError, torch.OutOfMemoryError) as error:
            gib = math.prod(sizes) * dtype.itemsize / (1 << 30)
            raise MemoryError(
                f"a KV pool of {blocks * block_size} tokens takes {gib:.1f} GiB on {device}"
            ) from error
        self.keys, self.values = list(keys), list(values)
        self.blocks = blocks
        self.dtype = dtype
        self.block_size = block_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put [tokens, kv_heads, head_dim] into `slots` [tokens], block * block_size + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of table [rows, n]: [rows, kv_heads, n * block_size, head_dim]."""
        return _gather(self.keys[layer], table), _gather(self.values[layer], table)


def _gather(pool: Tensor, table: Tensor) -> Tensor:
    rows, n = table.shape
    gathered = pool.index_select(0, table.flatten())
    return gathered.view(rows, n * pool.shape[1], *pool.shape[2:]).transpose(1, 2)
