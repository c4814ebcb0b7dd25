"""A path-compressed radix tree of block keys, and who holds how much of each path.

A key names its whole path from the root (`hotbranch.keys`). So two runs that agree at one depth
agree at every depth above it, which lets a match compare one key of a run instead of all, and
bisect to the point of divergence. Holders are bits of an integer: one step serves every holder.

Each holder's blocks form prefixes: it holds a run up to some depth, and what is below only while it
holds the run whole. An eviction in the middle therefore takes everything below it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A run of block keys. `full` holds it whole, `partial` maps a bit to its first n blocks."""

    parent: "Node | None"
    keys: list[int]
    full: int = 0
    partial: dict[int, int] = field(default_factory=dict)  # 0 < n < len(keys)
    children: dict[int, "Node"] = field(default_factory=dict)  # by first key

    def held(self, bit: int) -> int:
        """Blocks of the run that a holder has."""
        return len(self.keys) if self.full & bit else self.partial.get(bit, 0)

    def hold(self, bit: int, count: int) -> None:
        """Set how many blocks of the run a holder has."""
        if count == len(self.keys):
            self.full |= bit
            self.partial.pop(bit, None)
        else:
            self.full &= ~bit
            if count:
                self.partial[bit] = count
            else:
                self.partial.pop(bit, None)


Depths = list[tuple[int, int]]
"""(bits, blocks): these holders have exactly so many leading blocks."""


class PrefixTree:
    """Who holds which prefix. Pure; holders are distinct powers of two."""

    def __init__(self) -> None:
        self._root = Node(None, [])
        self._where: dict[int, Node] = {}

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._where)

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        """Leading blocks of a path that each holder in `bits` has; each bit occurs once."""
        depths: Depths = []
        depth, size = 0, len(keys)
        node = self._root.children.get(keys[0]) if size else None
        while node is not None and bits:
            shared = _shared(node.keys, 0, keys, depth)
            gone = bits & ~node.full
            if gone:
                bits ^= gone
                for bit, count in node.partial.items():
                    if gone & bit:
                        depths.append((bit, depth + min(count, shared)))
                        gone ^= bit
                if gone:
                    depths.append((gone, depth))
            depth += shared
            if shared < len(node.keys) or depth == size:
                break
            node = node.children.get(keys[depth])
        if bits:
            depths.append((bits, depth))
        return depths

    def store(self, bit: int, parent: int, keys: Sequence[int]) -> int:
        """A holder has the run of blocks below `parent`; how many of them are new to it.

        An unknown parent is a root seed. Below a known block that the holder does not have, nothing
        is stored: it could not be matched.
        """
        node, at = self._root, 0
        above = self._where.get(parent)
        if above is not None:
            node, at = above, _position(above, parent) + 1
            if node.held(bit) < at:
                return 0
        new, i = 0, 0
        while i < len(keys):
            if at == len(node.keys):
                child = node.children.get(keys[i])
                if child is None:
                    self._grow(node, bit, keys[i:])
                    return new + len(keys) - i
                node, at = child, 0
            shared = _shared(node.keys, at, keys, i)
            if shared:
                at += shared
                i += shared
                held = node.held(bit)
                if at > held:
                    new += at - held
                    node.hold(bit, at)
            else:
                self._split(node, at)
        return new

    def evict(self, bit: int, keys: Sequence[int]) -> int:
        """A holder has these blocks no more, nor what is below them; how many it lost."""
        lost, i, size = 0, 0, len(keys)
        while i < size:
            node = self._where.get(keys[i])
            if node is None:
                i += 1
                continue
            # Reports name children before parents: of a stretch in one run the last counts.
            while i + 1 < size and self._where.get(keys[i + 1]) is node:
                i += 1
            lost += self._cut(node, bit, _position(node, keys[i]))
            i += 1
        return lost

    def remove(self, bit: int) -> None:
        """Forget all that a holder has."""
        for node in list(self._root.children.values()):
            self._cut(node, bit, 0)

    def deepest(self, bit: int, key: int) -> bool:
        """Whether a holder has the block of `key`, and nothing below it."""
        node = self._where.get(key)
        if node is None or node.held(bit) != _position(node, key) + 1:
            return False
        return not any(child.held(bit) for child in node.children.values())

    def fork(self, bit: int, keys: Sequence[int]) -> int:
        """Leading blocks of a path below which a holder has another branch too."""
        node, depth, fork = self._root, 0, 0
        while depth < len(keys):
            child = node.children.get(keys[depth])
            if child is None or not child.held(bit):
                break
            if any(other.held(bit) for other in node.children.values() if other is not child):
                fork = depth
            shared = _shared(child.keys, 0, keys, depth)
            depth += shared
            if shared < len(child.keys):
                break
            node = child
        return fork

    def held(self, bit: int) -> Iterator[Sequence[int]]:
        """Runs that a holder has, parents before children."""
        for node in self._below(self._root):
            if count := node.held(bit):
                yield node.keys[:count]

    def _below(self, node: Node) -> Iterator[Node]:
        stack = list(node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _grow(self, node: Node, bit: int, keys: Sequence[int]) -> None:
        """Add blocks that nobody has, below the end of a run."""
        if node.full == bit and not node.partial and not node.children and node.parent:
            node.keys += keys
        else:
            child = Node(node, list(keys), bit)
            node.children[keys[0]] = child
            node = child
        self._where.update(dict.fromkeys(keys, node))

    def _split(self, node: Node, at: int) -> None:
        """Make the blocks of a run from `at` on a node of their own, below it."""
        lower = Node(node, node.keys[at:], node.full, children=node.children)
        lower.partial = {bit: n - at for bit, n in node.partial.items() if n > at}
        for child in lower.children.values():
            child.parent = lower
        node.full |= sum(bit for bit, n in node.partial.items() if n >= at)
        node.partial = {bit: n for bit, n in node.partial.items() if n < at}
        node.keys = node.keys[:at]
        node.children = {lower.keys[0]: lower}
        self._where.update(dict.fromkeys(lower.keys, lower))

    def _cut(self, node: Node, bit: int, keep: int) -> int:
        """Let a holder keep `keep` blocks of a run and nothing below; how many it lost."""
        lost = 0
        if node.full & bit:
            # Leaves first, so that what nobody has any more can go.
            for below in reversed(list(self._held_below(node, bit))):
                lost += below.held(bit)
                below.hold(bit, 0)
                self._trim(below)
        held = node.held(bit)
        if held > keep:
            lost += held - keep
            node.hold(bit, keep)
            self._trim(node)
        return lost

    def _held_below(self, node: Node, bit: int) -> Iterator[Node]:
        stack = [node]
        while stack:
            for child in stack.pop().children.values():
                if child.held(bit):
                    yield child
                    stack.append(child)

    def _trim(self, node: Node) -> None:
        """Drop the tail of a run that nobody has."""
        if node.full:
            return
        keep = max(node.partial.values(), default=0)
        for key in node.keys[keep:]:
            del self._where[key]
        if keep:
            del node.keys[keep:]
            for bit in [bit for bit, n in node.partial.items() if n == keep]:
                node.hold(bit, keep)
        elif node.parent:
            del node.parent.children[node.keys[0]]


def _position(node: Node, key: int) -> int:
    """Where a key stands in its run."""
    return len(node.keys) - 1 if node.keys[-1] == key else node.keys.index(key)


def _shared(run: Sequence[int], at: int, keys: Sequence[int], start: int) -> int:
    """Leading blocks that run[at:] and keys[start:] share. Equal at one depth, equal above it."""
    low, high = 0, min(len(run) - at, len(keys) - start)
    if high and run[at + high - 1] == keys[start + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if run[at + middle] == keys[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
