"""Memory on huge pages, where the system has them: weights and KV are read faster, for a walk
through page tables costs more than it reads."""

import math
import mmap

import torch
from torch import Tensor

HUGE = 1 << 21
CHUNK = 1 << 26


class Arena:
    """Hands out tensors of zeros from large stretches of memory."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        if size > len(self._rest):
            self._rest = _map(max(size, CHUNK))
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken.view(dtype)[: math.prod(shape)].view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _map(size: int) -> Tensor:
    mapped = mmap.mmap(-1, size + HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE
    return memory[start : start + size]
