"""Blocks that a replica will hold soon, because a request for them was sent to it.

A prediction covers a whole path from the root, for a short while. Siblings in a burst follow it
before any report is there; the report then says the same for good. The paths are kept as a tree of
references into the prompts' own key chains, so that predicting a path costs a step for each of its
forks, whatever its length.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.index.tree import Depths


@dataclass(slots=True, eq=False)
class _Node:
    """Blocks [start, stop) of all paths through here; `keys` is one of them, from the root on.

    Every predicted path ends at the end of a node, so whoever is predicted here is so for the whole
    node. `bits` are those who are, `ends` counts the paths of each that end here or below.
    """

    parent: "_Node | None"
    keys: Sequence[int]
    start: int
    stop: int
    bits: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    children: dict[int, "_Node"] = field(default_factory=dict)  # by first key


@dataclass(slots=True)
class _End:
    """Of a predicted path: the node it ends with, when its life ends, how many count on it."""

    node: _Node
    until: float
    claims: int


class Predictions:
    """Paths with an end of life. Pure; times in seconds of the caller's clock.

    Holds on to the key sequences it is given: they must not change.
    """

    def __init__(self) -> None:
        self._root = _Node(None, (), 0, 0)
        self._size = 0
        self._ends: dict[tuple[int, int], _End] = {}  # by bit and last key
        # (time, bit, last key) of ends, as predicted and as shortened since; some are out of date
        self._queue: deque[tuple[float, int, int]] = deque()
        self._computed: deque[tuple[float, int, int]] = deque()

    def __len__(self) -> int:
        """Distinct predicted blocks."""
        return self._size

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        """Leading blocks of a path that are predicted for each holder in `bits`, if any."""
        depths: Depths = []
        depth, node = 0, self._root
        while depth == node.stop < len(keys):
            child = node.children.get(keys[depth])
            below = bits & child.bits if child else 0
            if depth and below != bits:
                depths.append((bits ^ below, depth))
            if child is None or not below:
                return depths
            bits, node = below, child
            depth = _agree(node, keys)
        if depth:
            depths.append((bits, depth))
        return depths

    def add(self, bit: int, keys: Sequence[int], until: float) -> None:
        """Predict a path; `until` never decreases from call to call."""
        if not keys:
            return
        end = self._ends.get((bit, keys[-1]))
        if end is None:
            end = self._ends[bit, keys[-1]] = _End(self._grow(keys), until, 0)
            self._count(end.node, bit, 1)
        end.until = until
        end.claims += 1
        self._queue.append((until, bit, keys[-1]))

    def withdraw(self, bit: int, keys: Sequence[int]) -> None:
        """Take back what was predicted for a prompt; what others count on stays."""
        end = self._ends.get((bit, keys[-1])) if keys else None
        if end and end.claims:
            end.claims -= 1
            if not end.claims:
                self._drop(bit, keys[-1])

    def computed(self, bit: int, keys: Sequence[int], until: float) -> None:
        """A prompt no longer counts on its prediction, whose life now ends at `until` at the latest
        unless another one does. `until` never decreases from call to call.
        """
        end = self._ends.get((bit, keys[-1])) if keys else None
        if end is None:
            return
        end.claims = max(0, end.claims - 1)
        if not end.claims:
            end.until = min(end.until, until)
            self._computed.append((until, bit, keys[-1]))

    def missed(self, bit: int, keys: Sequence[int], have: int) -> None:
        """The holder had only the first `have` blocks: the rest goes, whoever counts on it."""
        node = self._root
        while node.stop <= have < len(keys):
            child = node.children.get(keys[node.stop])
            if child is None or not child.bits & bit or _agree(child, keys) <= have < child.stop:
                return
            node = child
        if have < len(keys):
            for last in [node.keys[node.stop - 1] for node in _below(node, bit)]:
                if (bit, last) in self._ends:
                    self._drop(bit, last)

    def expire(self, now: float) -> None:
        """Forget the paths whose life has ended."""
        for queue in (self._queue, self._computed):
            while queue and queue[0][0] <= now:
                self._expire(queue, now)

    def shed(self) -> bool:
        """Forget the path that was predicted first; whether there was one."""
        if self._queue:
            self._expire(self._queue, self._queue[0][0])
            return True
        return False

    def remove(self, bit: int) -> None:
        """Forget all of a holder."""
        if self._root.bits & bit:
            for _, last in [end for end in self._ends if end[0] == bit]:
                self._drop(bit, last)

    def _expire(self, queue: deque[tuple[float, int, int]], now: float) -> None:
        _, bit, last = queue.popleft()
        end = self._ends.get((bit, last))
        if end and end.until <= now:
            self._drop(bit, last)

    def _drop(self, bit: int, last: int) -> None:
        node = self._ends.pop((bit, last)).node
        self._count(node, bit, -1)
        while node.parent is not None and not node.bits:
            node = node.parent
        _join(node)

    def _grow(self, keys: Sequence[int]) -> _Node:
        """The node that a path ends with, which may be new."""
        node, size = self._root, len(keys)
        while node.stop < size:
            child = node.children.get(keys[node.stop])
            if child is None:
                child = _Node(node, keys, node.stop, size)
                node.children[keys[node.stop]] = child
                self._size += size - node.stop
                return child
            depth = _agree(child, keys)
            node = child if depth == child.stop else _split(child, depth)
            node.keys = keys  # the newest lives longest: let the older ones go
        return node

    def _count(self, node: _Node | None, bit: int, more: int) -> None:
        """One path more, or less, ends with a node."""
        while node is not None:
            above = node.parent
            node.ends[bit] = node.ends.get(bit, 0) + more
            if node.ends[bit]:
                node.bits |= bit
            else:
                del node.ends[bit]
                node.bits ^= bit
            if above is not None and not node.bits:
                del above.children[node.keys[node.start]]
                self._size -= node.stop - node.start
            node = above


def _split(node: _Node, at: int) -> _Node:
    """Make the blocks before `at` a node of their own, above it; that node."""
    parent = node.parent
    assert parent is not None
    children = {node.keys[at]: node}
    upper = _Node(parent, node.keys, node.start, at, node.bits, dict(node.ends), children)
    parent.children[node.keys[node.start]] = upper
    node.parent, node.start = upper, at
    return upper


def _join(node: _Node) -> None:
    """Let the only child of a node have its blocks too, where no path ends between the two."""
    above, children = node.parent, list(node.children.values())
    if above is not None and len(children) == 1 and children[0].ends == node.ends:
        child = children[0]
        child.parent, child.start = above, node.start
        above.children[child.keys[child.start]] = child


def _below(node: _Node, bit: int) -> Iterator[_Node]:
    """A node, and all below it, where a holder is predicted."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.bits & bit:
            yield node
            stack += node.children.values()


def _agree(node: _Node, keys: Sequence[int]) -> int:
    """How deep a path goes that enters a node. Equal at one depth, equal above it."""
    low, high = node.start + 1, min(node.stop, len(keys))
    if node.keys[high - 1] == keys[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if node.keys[middle] == keys[middle]:
            low = middle + 1
        else:
            high = middle
    return low
