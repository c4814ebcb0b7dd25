"""What a replica that never reports holds, as far as one can tell from what was sent to it.

Its cache is taken for one that keeps every prompt and evicts the least recently used leaf when its
capacity is full, which is what the engines do.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.index.tree import PrefixTree


class History:
    """Paths sent to silent holders, coldest first, kept in the tree of reports. Pure."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._capacity: dict[int, int] = {}
        self._paths: dict[int, OrderedDict[int, Sequence[int]]] = {}  # bit -> by last key

    def open(self, bit: int, capacity: int) -> None:
        """Stand in for a holder that has room for `capacity` blocks. It holds nothing yet."""
        self.close(bit)
        self._capacity[bit] = capacity
        self._paths[bit] = OrderedDict()

    def close(self, bit: int) -> None:
        """Forget a holder: it reports, or is gone."""
        self._tree.remove(bit)
        self._capacity.pop(bit, None)
        self._paths.pop(bit, None)

    def clear(self, bit: int) -> None:
        """A holder holds nothing, and is silent still if it was."""
        if bit in self._paths:
            self.open(bit, self._capacity[bit])

    def add(self, bit: int, keys: Sequence[int], now: float) -> None:
        """A prompt was sent to a holder, which is ignored unless it was opened."""
        paths = self._paths.get(bit)
        if paths is None or not keys:
            return
        self._tree.store(bit, None, keys, now, served=True)
        paths[keys[-1]] = keys
        paths.move_to_end(keys[-1])
        self._shrink(bit, self._capacity[bit])

    def missed(self, bit: int, keys: Sequence[int], have: int, now: float) -> None:
        """A prompt found only its first `have` blocks: what was below them had been evicted."""
        if bit in self._paths:
            for _, lost in self._tree.evict(bit, keys[have : have + 1]):
                for key in lost:
                    self._paths[bit].pop(key, None)
            self.add(bit, keys, now)

    def withdraw(self, bit: int, keys: Sequence[int]) -> None:
        """A prompt never ran. What other paths need stays."""
        paths = self._paths.get(bit)
        if paths and keys and paths.pop(keys[-1], None):
            self._evict(bit, keys, len(keys))

    def forgotten(self, bit: int, keys: Sequence[int]) -> None:
        """The index let go of the end of a branch; what is left of its paths is evicted first."""
        paths = self._paths.get(bit, OrderedDict())
        for key in keys:
            if path := paths.pop(key, None):
                left = path[: path.index(keys[0])]
                if left and left[-1] not in paths:
                    paths[left[-1]] = left
                    paths.move_to_end(left[-1], last=False)

    def _shrink(self, bit: int, blocks: int) -> None:
        """Evict until the holder has at most so many blocks."""
        paths = self._paths[bit]
        while (excess := self._tree.count(bit) - blocks) > 0:
            _, keys = paths.popitem(last=False)
            left = self._evict(bit, keys, excess)
            if left:
                paths[keys[left - 1]] = keys[:left]
                paths.move_to_end(keys[left - 1], last=False)

    def _evict(self, bit: int, keys: Sequence[int], most: int) -> int:
        """Evict up to `most` blocks of a path from its tail, none that another path needs.

        Returns the blocks of the path that no other one needs and that are left.
        """
        if not self._tree.deepest(bit, keys[-1]):
            return 0
        paths, shared = self._paths[bit], self._tree.fork(bit, keys)
        own = 0
        while own <= min(most, len(keys) - shared - 1) and keys[-1 - own] not in paths:
            own += 1
        going = min(own, most)
        self._tree.evict(bit, keys[len(keys) - going :][::-1])
        return len(keys) - going if going < own else 0
