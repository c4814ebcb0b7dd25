"""Blocks that a replica will hold soon, because a request for them was sent to it.

A prediction covers a whole path from the root, for a short while. Siblings in a burst follow it
before any report is there; the report then says the same for good.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from router.index.tree import Depths, PrefixTree


class _End(NamedTuple):
    """Of a predicted path: when its life ends, and how many prompts count on it."""

    until: float
    claims: int
    keys: Sequence[int]


class Predictions:
    """Paths with an end of life. Pure; times in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._ends: dict[tuple[int, int], _End] = {}  # by bit and last key
        # (time, bit, last key) of ends, as predicted and as shortened since; some are out of date
        self._queue: deque[tuple[float, int, int]] = deque()
        self._computed: deque[tuple[float, int, int]] = deque()

    def __len__(self) -> int:
        """Distinct predicted blocks."""
        return len(self._tree)

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        return self._tree.match(keys, bits)

    def add(self, bit: int, keys: Sequence[int], until: float) -> None:
        """Predict a path; `until` never decreases from call to call."""
        if keys:
            self._tree.store(bit, None, keys, until, served=False)
            known = self._ends.get((bit, keys[-1]))
            self._ends[bit, keys[-1]] = _End(until, known.claims + 1 if known else 1, keys)
            self._queue.append((until, bit, keys[-1]))

    def withdraw(self, bit: int, keys: Sequence[int]) -> None:
        """Take back what was predicted for a prompt; what others count on stays."""
        end = self._ends.get((bit, keys[-1])) if keys else None
        if end and end.claims > 1:
            self._ends[bit, keys[-1]] = end._replace(claims=end.claims - 1)
        elif end and end.claims:
            self._cut(bit, keys[-1])

    def computed(self, bit: int, keys: Sequence[int], until: float) -> None:
        """A prompt no longer counts on its prediction, whose life now ends at `until` at the latest
        unless another one does. `until` never decreases from call to call.
        """
        end = self._ends.get((bit, keys[-1])) if keys else None
        if end is None:
            return
        left = max(0, end.claims - 1)
        sooner = end.until if left else min(end.until, until)
        self._ends[bit, keys[-1]] = end._replace(claims=left, until=sooner)
        if not left:
            self._computed.append((until, bit, keys[-1]))

    def missed(self, bit: int, keys: Sequence[int], have: int) -> None:
        """The holder had only the first `have` blocks: the rest goes, whoever counts on it."""
        for _, lost in self._tree.evict(bit, keys[have : have + 1]):
            for key in lost:
                self._ends.pop((bit, key), None)
        if have and (bit, keys[have - 1]) not in self._ends:
            self._trim(bit, keys[:have])

    def expire(self, now: float) -> None:
        """Forget the paths whose life has ended."""
        for queue in (self._queue, self._computed):
            while queue and queue[0][0] <= now:
                self._drop(queue, now)

    def shed(self) -> bool:
        """Forget the path that was predicted first; whether there was one."""
        if self._queue:
            self._drop(self._queue, self._queue[0][0])
            return True
        return False

    def remove(self, bit: int) -> None:
        """Forget all of a holder."""
        if self._tree.count(bit):
            self._tree.remove(bit)
            for end in [end for end in self._ends if end[0] == bit]:
                del self._ends[end]

    def _drop(self, queue: deque[tuple[float, int, int]], now: float) -> None:
        _, bit, last = queue.popleft()
        end = self._ends.get((bit, last))
        if end and end.until <= now:
            self._cut(bit, last)

    def _cut(self, bit: int, last: int) -> None:
        self._trim(bit, self._ends.pop((bit, last)).keys)

    def _trim(self, bit: int, keys: Sequence[int]) -> None:
        """Forget the end of a path that nobody counts on."""
        if not self._tree.deepest(bit, keys[-1]):
            return  # a longer path goes on from here
        shared = self._tree.fork(bit, keys)
        first = len(keys) - 1
        while first > shared and (bit, keys[first - 1]) not in self._ends:
            first -= 1
        self._tree.evict(bit, keys[first:][::-1])
