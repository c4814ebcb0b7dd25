"""What a replica that never reports holds, as far as one can tell from what was sent to it.

Its cache is taken for one that keeps every prompt and evicts the least recently used leaf when its
capacity is full, which is what the engines do.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.index.tree import PrefixTree

RAN = -1  # in place of claims: the path was computed, and is held whatever happens to later prompts


class History:
    """Paths sent to silent holders, coldest first, kept in the tree of reports. Pure."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._capacity: dict[int, int] = {}
        # bit -> last key of a path -> prompts that count on it, or RAN
        self._paths: dict[int, OrderedDict[int, int]] = {}

    def open(self, bit: int, capacity: int) -> None:
        """Stand in for a holder that has room for `capacity` blocks. It holds nothing yet."""
        self.close(bit)
        self._capacity[bit] = capacity
        self._paths[bit] = OrderedDict()

    def close(self, bit: int) -> None:
        """Forget a holder: it reports, or is gone."""
        if self._paths.pop(bit, None) is not None:
            self._tree.remove(bit)
            del self._capacity[bit]

    def clear(self, bit: int) -> None:
        """A holder holds nothing, and is silent still if it was."""
        if self._paths.get(bit):
            self.open(bit, self._capacity[bit])

    def add(self, bit: int, keys: Sequence[int], now: float) -> None:
        """A prompt was sent to a holder, which is ignored unless it was opened."""
        paths = self._paths.get(bit)
        if paths is None or not keys:
            return
        self._tree.store(bit, None, keys, now, served=True)
        claims = paths.get(keys[-1], 0)
        paths[keys[-1]] = claims if claims == RAN else claims + 1
        paths.move_to_end(keys[-1])
        self._shrink(bit, self._capacity[bit])

    def computed(self, bit: int, keys: Sequence[int]) -> None:
        """A prompt has run."""
        paths = self._paths.get(bit)
        if paths and keys and keys[-1] in paths:
            paths[keys[-1]] = RAN

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
        claims = paths.get(keys[-1], RAN) if paths and keys else RAN
        if paths and claims > 1:
            paths[keys[-1]] = claims - 1
        elif paths and claims == 1:
            del paths[keys[-1]]
            self._evict(bit, keys[-1], len(keys))

    def forgotten(self, bit: int, above: int | None, keys: Sequence[int]) -> None:
        """The index let go of the end of a branch, `keys` below `above`; what is left of the paths
        through it is evicted first."""
        paths = self._paths.get(bit)
        if paths is None:
            return
        gone = [key for key in keys if paths.pop(key, None)]
        if gone and above is not None and above not in paths:
            paths[above] = RAN
            paths.move_to_end(above, last=False)

    def _shrink(self, bit: int, blocks: int) -> None:
        """Evict until the holder has at most so many blocks."""
        paths = self._paths[bit]
        while paths and (excess := self._tree.count(bit) - blocks) > 0:
            last, claims = paths.popitem(last=False)
            left = self._evict(bit, last, excess)
            if left is not None:
                paths[left] = claims
                paths.move_to_end(left, last=False)

    def _evict(self, bit: int, last: int, most: int) -> int | None:
        """Evict up to `most` blocks of a path from its tail, none that another path needs.

        Returns the key it ends with now, if some of it is left that no other path needs.
        """
        if not self._tree.deepest(bit, last):
            return None
        keys = self._tree.path(last)
        paths, shared = self._paths[bit], self._tree.fork(bit, keys)
        own = 0
        while own <= min(most, len(keys) - shared - 1) and keys[-1 - own] not in paths:
            own += 1
        going = min(own, most)
        self._tree.evict(bit, keys[len(keys) - going :][::-1])
        return keys[len(keys) - going - 1] if going < own else None
