"""The free list of the KV pool: which blocks are nobody's. Tensors live in the model runner."""

from collections.abc import Iterable


class BlockPool:
    """Blocks 0..size-1, each either free or handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Hand out `count` blocks, the last freed first. IndexError when fewer are free."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._taken[block] = True
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back. ValueError for one that is free already."""
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"block {block} freed twice")
            self._taken[block] = False
            self._free.append(block)
