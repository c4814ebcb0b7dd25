"""A path-compressed radix tree of block keys, and who holds how much of each path.

A key names its whole path from the root (`hotbranch.keys`). So two runs that agree at one depth
agree at every depth above it, which lets a match compare one key of a run instead of all, and
bisect to the point of divergence. Holders are bits of an integer: one step serves every holder.

Each holder's blocks form prefixes: it holds a run up to some depth, and what is below only while it
holds the run whole. An eviction in the middle therefore takes everything below it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.index.heat import COLD, Heat, rate, warmed


@dataclass(slots=True, eq=False)
class Node:
    """A run of block keys. `full` holds it whole, `partial` maps a bit to its first n blocks.

    `heat` counts the blocks of all that was served through here, by the bit of who served it.
    """

    parent: "Node | None"
    keys: list[int]
    full: int = 0
    partial: dict[int, int] = field(default_factory=dict)  # 0 < n < len(keys)
    children: dict[int, "Node"] = field(default_factory=dict)  # by first key
    heat: dict[int, Heat] | None = None  # None: of no one

    def held(self, bit: int) -> int:
        """Blocks of the run that a holder has."""
        return len(self.keys) if self.full & bit else self.partial.get(bit, 0)

    def hold(self, bit: int, count: int) -> None:
        """Set how many blocks of the run a holder has."""
        if count == len(self.keys):
            self.full |= bit
            self.partial.pop(bit, None)
            return
        self.full &= ~bit
        if count:
            self.partial[bit] = count
        else:
            self.partial.pop(bit, None)
            if self.heat:
                self.heat.pop(bit, None)

    def bits(self) -> list[int]:
        """The bits of all that hold some of the run."""
        return [*(1 << place for place in positions(self.full)), *self.partial]


_SET = [[place for place in range(8) if byte >> place & 1] for byte in range(256)]


def positions(bits: int) -> Iterator[int]:
    """Where a number has its ones, byte by byte: its length costs a step only every eight bits."""
    for at, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        if byte:
            for place in _SET[byte]:
                yield 8 * at + place


Depths = list[tuple[int, int]]
"""(bits, blocks): these holders have exactly so many leading blocks."""

Run = tuple[int | None, Sequence[int]]
"""Block keys, and the key before them; None at a root."""


class Inconsistent(ValueError):
    """A key in two places: two paths cannot have one name. Nothing of the run was stored."""


class PrefixTree:
    """Who holds which prefix. Pure; holders are distinct powers of two."""

    def __init__(self) -> None:
        self.root = Node(None, [])
        self._where: dict[int, Node] = {}
        # Coldest first. What is used warms all above it, so every node comes after its children,
        # and the first one is a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._counts: dict[int, int] = {}
        self._kin: dict[int, int] = {}  # bit -> it and those that inherited, where there are any

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._where)

    def count(self, bit: int) -> int:
        """Blocks that a holder has."""
        return self._counts.get(bit, 0)

    def holds(self, bit: int, key: int) -> bool:
        """Whether a holder has a block, and all before it."""
        node = self._where.get(key)
        return node is not None and node.held(bit) > _position(node, key)

    def match(self, keys: Sequence[int], bits: int) -> Depths:
        """Leading blocks of a path that each holder in `bits` has; each bit occurs once."""
        depths: Depths = []
        depth, size = 0, len(keys)
        node = self.root.children.get(keys[0]) if size else None
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

    def store(
        self, bit: int, parent: int | None, keys: Sequence[int], now: float, served: bool
    ) -> int:
        """A holder has the run of blocks below `parent`, a key or None for a root.

        Those that it had already are a leading part of the run; how many are new to it, which is
        heat if they were `served` just now. -1, and nothing is stored, when it does not have the
        parent: the run could not be matched. Raises Inconsistent.
        """
        node, at = self.root, 0
        if parent is not None:
            above = self._where.get(parent)
            at = _position(above, parent) + 1 if above else 0
            if above is None or above.held(bit) < at:
                return -1
            node = above
        new, i = 0, 0
        while i < len(keys):
            if at == len(node.keys):
                child = node.children.get(keys[i])
                if child is None:
                    node = self._grow(node, bit, keys[i:], served)
                    new += len(keys) - i
                    break
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
                node = self._split(node, at)
                self._warm(node, bit, 0, now)
        self._counts[bit] = self._counts.get(bit, 0) + new
        if served:
            self._warm(node, bit, new, now)
        return new

    def serve(self, bit: int, keys: Sequence[int], now: float) -> None:
        """A holder serves a path again, as far as it has it."""
        node, depth = self.root, 0
        while depth < len(keys):
            child = node.children.get(keys[depth])
            held = child.held(bit) if child else 0
            if child is None or not held:
                break
            shared = min(held, _shared(child.keys, 0, keys, depth))
            depth += shared
            node = child
            if shared < len(child.keys):
                break
        self._warm(node, bit, depth, now)

    def evict(self, bit: int, keys: Sequence[int]) -> list[Run]:
        """A holder has these blocks no more, nor what is below them; the runs that it lost."""
        lost: list[Run] = []
        i, size = 0, len(keys)
        while i < size:
            node = self._where.get(keys[i])
            if node is None:
                i += 1
                continue
            start, i = i, i + 1
            while i < size and self._where.get(keys[i]) is node:
                i += 1
            self._cut(node, bit, _first(node, keys[start:i]), lost)
        return lost

    def forget(self, limit: int) -> list[tuple[int, Run]]:
        """Drop the coldest blocks, whoever holds them, tails first, down to `limit`; who lost what.

        A run counts as used as a whole, however far into it a prompt went.
        """
        losses: list[tuple[int, Run]] = []
        while len(self) > limit:
            node = next(iter(self._order))
            keep = max(0, len(node.keys) - (len(self) - limit))
            above = node.keys[keep - 1] if keep else _last_key(node.parent)
            for bit in node.bits():
                if (held := node.held(bit)) > keep:
                    losses.append((bit, (above, node.keys[keep:held])))
                    self._counts[bit] -= held - keep
                    node.hold(bit, keep)
            self._trim(node)
        return losses

    def heats(self, bit: int) -> list[tuple[Heat, int]]:
        """Where a holder's heat is: by the last of its blocks in each run."""
        return [
            (heat, node.keys[node.held(bit) - 1])
            for node in self._nodes()
            if node.heat and (heat := node.heat.get(bit))
        ]

    def reheat(self, bit: int, heats: list[tuple[Heat, int]], now: float) -> None:
        """Put heat back where a holder still has the blocks, and let them be used last."""
        for heat, key in sorted(heats, key=lambda entry: rate(entry[0], now)):
            node = self._where.get(key)
            if node is not None and self.holds(bit, key):
                node.heat = (node.heat or {}) | {bit: heat}
                self._warm(node, bit, 0, now)

    def path(self, key: int) -> list[int]:
        """The keys from the root down to a known one."""
        node: Node | None = self._where[key]
        assert node is not None
        runs = [node.keys[: _position(node, key) + 1]]
        while (node := node.parent) is not None:
            runs.append(node.keys)
        return [key for run in reversed(runs) for key in run]

    def inherit(self, bit: int, source: int) -> None:
        """A holder that has nothing has what another one has, and will get what that one gets."""
        for node in self._nodes():
            if count := node.held(source):
                node.hold(bit, count)
        self._counts[bit] = self.count(source)
        kin = self._kin.get(source, source) | bit
        self._kin.update((1 << place, kin) for place in positions(kin))

    def leave(self, bit: int) -> None:
        """A holder is gone, and with it its part in what others get."""
        kin = self._kin.pop(bit, bit) ^ bit
        self._kin.update((1 << place, kin) for place in positions(kin))

    def remove(self, bit: int) -> None:
        """Forget all that a holder has."""
        if not self._counts.get(bit):
            return
        for node in list(self.root.children.values()):
            self._cut(node, bit, 0, [])
        if self.root.heat:
            self.root.heat.pop(bit, None)
        self._counts.pop(bit, None)

    def deepest(self, bit: int, key: int) -> bool:
        """Whether a holder has the block of `key`, and nothing below it."""
        node = self._where.get(key)
        if node is None or node.held(bit) != _position(node, key) + 1:
            return False
        return not any(child.held(bit) for child in node.children.values())

    def fork(self, bit: int, keys: Sequence[int]) -> int:
        """Leading blocks of a path below which a holder has another branch too."""
        node, depth, fork = self.root, 0, 0
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
        for node in self._nodes():
            if count := node.held(bit):
                yield node.keys[:count]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _warm(self, node: Node | None, bit: int, blocks: int, now: float) -> None:
        """Blocks were served on the path that ends at a node: it is the most recently used one."""
        while node is not None:
            if node.parent is not None:
                self._order.move_to_end(node)
            if blocks:
                if node.heat is None:
                    node.heat = {}
                node.heat[bit] = warmed(node.heat.get(bit, COLD), blocks, now)
            node = node.parent

    def _grow(self, node: Node, bit: int, keys: Sequence[int], served: bool) -> Node:
        """Add blocks that nobody has, below the end of a run; the node they are on."""
        size = len(self._where)
        kin = self._kin.get(bit, bit) & node.full
        if kin & bit and kin == node.full and not (node.partial or node.children):
            if kin != bit:  # they get their blocks right after, and shall not need a node for each
                node.partial = {1 << place: len(node.keys) for place in positions(kin ^ bit)}
                node.full = bit
            node.keys += keys
        else:
            child = Node(node, list(keys), bit)
            node.children[keys[0]] = child
            self._order[child] = None
            if not served:
                self._order.move_to_end(child, last=False)  # nobody has asked for it here
            node = child
        self._where.update(dict.fromkeys(keys, node))
        if len(self._where) < size + len(keys):
            self._ungrow(node, len(keys))
            raise Inconsistent
        return node

    def _ungrow(self, node: Node, count: int) -> None:
        """Take back blocks that took the place of others, which only a defect elsewhere sends."""
        del node.keys[len(node.keys) - count :]
        for bit in [bit for bit, n in node.partial.items() if n == len(node.keys)]:
            node.hold(bit, len(node.keys))
        if not node.keys and node.parent is not None:
            node.parent.children = {k: n for k, n in node.parent.children.items() if n is not node}
            del self._order[node]
        self._where = {key: node for node in self._nodes() for key in node.keys}

    def _split(self, node: Node, at: int) -> Node:
        """Make the first `at` blocks of a run a node of their own, above it; that node."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.keys[:at], node.full, children={node.keys[at]: node})
        upper.full |= sum(bit for bit, n in node.partial.items() if n >= at)
        upper.partial = {bit: n for bit, n in node.partial.items() if n < at}
        upper.heat = dict(node.heat) if node.heat else None
        parent.children[node.keys[0]] = upper
        node.parent = upper
        del node.keys[:at]
        for bit, n in list(node.partial.items()):
            node.hold(bit, max(0, n - at))
        self._order[upper] = None
        self._where.update(dict.fromkeys(upper.keys, upper))
        return upper

    def _cut(self, node: Node, bit: int, keep: int, lost: list[Run]) -> None:
        """Let a holder keep `keep` blocks of a run and nothing below; adds what it lost."""
        if node.full & bit:
            # Leaves first, so that what nobody has any more can go.
            for below in reversed(list(self._held_below(node, bit))):
                self._shorten(below, bit, 0, lost)
        if node.held(bit) > keep:
            self._shorten(node, bit, keep, lost)

    def _shorten(self, node: Node, bit: int, keep: int, lost: list[Run]) -> None:
        held = node.held(bit)
        above = node.keys[keep - 1] if keep else _last_key(node.parent)
        lost.append((above, node.keys[keep:held]))
        self._counts[bit] -= held - keep
        node.hold(bit, keep)
        self._trim(node)

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
            del self._order[node]


def _last_key(node: Node | None) -> int | None:
    return node.keys[-1] if node is not None and node.keys else None


def _position(node: Node, key: int) -> int:
    """Where a key stands in its run."""
    return len(node.keys) - 1 if node.keys[-1] == key else node.keys.index(key)


def _first(node: Node, keys: Sequence[int]) -> int:
    """Where the first of these keys stands in their run. It is the last one named, as a rule."""
    position = _position(node, keys[-1])
    if node.keys[position : position + len(keys)] == list(reversed(keys)):
        return position
    named = set(keys)
    return next(place for place, key in enumerate(node.keys) if key in named)


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
