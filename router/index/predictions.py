"""Blocks that a replica will hold soon, because a request for them was sent to it.

A prediction covers a whole path from the root, for a short while. Siblings in a burst follow it
before any report is there; the report then says the same for good.
"""

from collections import deque
from collections.abc import Sequence

from router.index.tree import Depths, PrefixTree

_UNCLAIMED = (0.0, 0)


class Predictions:
    """Paths with an end of life. Pure; times in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        # (bit, last key of a path) -> end of life, prompts that count on it
        self._ends: dict[tuple[int, int], tuple[float, int]] = {}
        self._queue: deque[tuple[float, int, Sequence[int]]] = deque()

    def __len__(self) -> int:
        """Distinct predicted blocks."""
        return len(self._tree)

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        return self._tree.match(keys, bits)

    def add(self, bit: int, parent: int, keys: Sequence[int], until: float) -> None:
        """Predict a path below its root seed; `until` never decreases from call to call."""
        if keys:
            self._tree.store(bit, parent, keys)
            claims = self._ends.get((bit, keys[-1]), _UNCLAIMED)[1]
            self._ends[bit, keys[-1]] = until, claims + 1
            self._queue.append((until, bit, keys))

    def withdraw(self, bit: int, keys: Sequence[int]) -> None:
        """Take back what was predicted for a prompt; what others count on stays."""
        if not keys:
            return
        until, claims = self._ends.get((bit, keys[-1]), _UNCLAIMED)
        if claims > 1:
            self._ends[bit, keys[-1]] = until, claims - 1
        elif claims:
            self._cut(bit, keys)

    def expire(self, now: float) -> None:
        """Forget the paths whose life has ended."""
        while self._queue and self._queue[0][0] <= now:
            _, bit, keys = self._queue.popleft()
            until, claims = self._ends.get((bit, keys[-1]), _UNCLAIMED)
            if claims and until <= now:
                self._cut(bit, keys)

    def remove(self, bit: int) -> None:
        """Forget all of a holder."""
        self._tree.remove(bit)
        for end in [end for end in self._ends if end[0] == bit]:
            del self._ends[end]

    def _cut(self, bit: int, keys: Sequence[int]) -> None:
        del self._ends[bit, keys[-1]]
        if not self._tree.deepest(bit, keys[-1]):
            return  # a longer path goes on from here
        shared = self._tree.fork(bit, keys)
        first = len(keys) - 1
        while first > shared and (bit, keys[first - 1]) not in self._ends:
            first -= 1
        self._tree.evict(bit, keys[first:][::-1])
