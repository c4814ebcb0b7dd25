"""Blocks that a replica will hold soon, because a request for them was sent to it.

A prediction covers a whole path from the root, for a short while. Siblings in a burst follow it
before any report is there; the report then says the same for good.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

from router.index.tree import Depths, PrefixTree

_UNCLAIMED = (0.0, 0)
_NEVER = (inf, 0)


class Predictions:
    """Paths with an end of life. Pure; times in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        # (bit, last key of a path) -> end of life, prompts that count on it
        self._ends: dict[tuple[int, int], tuple[float, int]] = {}
        # by end of life: as predicted, and as shortened since
        self._queue: deque[tuple[float, int, Sequence[int]]] = deque()
        self._computed: deque[tuple[float, int, Sequence[int]]] = deque()

    def __len__(self) -> int:
        """Distinct predicted blocks."""
        return len(self._tree)

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        return self._tree.match(keys, bits)

    def add(self, bit: int, keys: Sequence[int], until: float) -> None:
        """Predict a path; `until` never decreases from call to call."""
        if keys:
            self._tree.store(bit, None, keys, until, served=False)
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

    def computed(self, bit: int, keys: Sequence[int], until: float) -> None:
        """A prompt no longer counts on its prediction, whose life now ends at `until` at the latest
        unless another one does. `until` never decreases from call to call.
        """
        if keys and (end := self._ends.get((bit, keys[-1]))):
            left = max(0, end[1] - 1)
            self._ends[bit, keys[-1]] = (end[0] if left else min(end[0], until)), left
            if not left:
                self._computed.append((until, bit, keys))

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
                _, bit, keys = queue.popleft()
                if self._ends.get((bit, keys[-1]), _NEVER)[0] <= now:
                    self._cut(bit, keys)

    def shed(self) -> bool:
        """Forget the path that was predicted first; whether there was one."""
        if not self._queue:
            return False
        until, bit, keys = self._queue.popleft()
        if self._ends.get((bit, keys[-1]), _NEVER)[0] <= until:
            self._cut(bit, keys)
        return True

    def remove(self, bit: int) -> None:
        """Forget all of a holder."""
        self._tree.remove(bit)
        for end in [end for end in self._ends if end[0] == bit]:
            del self._ends[end]

    def _cut(self, bit: int, keys: Sequence[int]) -> None:
        del self._ends[bit, keys[-1]]
        self._trim(bit, keys)

    def _trim(self, bit: int, keys: Sequence[int]) -> None:
        """Forget the end of a path that nobody counts on."""
        if not self._tree.deepest(bit, keys[-1]):
            return  # a longer path goes on from here
        shared = self._tree.fork(bit, keys)
        first = len(keys) - 1
        while first > shared and (bit, keys[first - 1]) not in self._ends:
            first -= 1
        self._tree.evict(bit, keys[first:][::-1])
