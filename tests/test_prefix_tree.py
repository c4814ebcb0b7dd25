"""The tree of holders against sets of paths."""

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbranch.keys import block_keys, root
from router.index.tree import Inconsistent, PrefixTree

BITS = (1, 2, 4)
SEED = root("m")
Path = tuple[int, ...]
SHORT = [path for size in (1, 2, 3) for path in product((0, 1), repeat=size)]
bits = st.sampled_from(BITS)
# two letters, so that paths share, fork and end within each other
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path) -> list[int]:
    return block_keys(b"".join(block.to_bytes(4, "little") for block in path), 1, SEED)


def prefixes(path: Path) -> list[Path]:
    return [path[: end + 1] for end in range(len(path))]


def below(known: set[Path], path: Path) -> set[Path]:
    """The path and what goes on from it."""
    return {other for other in known if other[: len(path)] == path}


class TreeMachine(RuleBasedStateMachine):
    """`used` numbers the uses: a run counts as used as a whole, so it is noted for all of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.known: dict[int, set[Path]] = {bit: set() for bit in BITS}
        self.used: dict[int, int] = {}  # key -> when
        self.uses = 0

    def everywhere(self) -> set[Path]:
        return set().union(*self.known.values())

    def depth(self, bit: int, path: Path) -> int:
        return sum(prefix in self.known[bit] for prefix in prefixes(path))

    def use(self, keys: list[int]) -> None:
        """The run that a path ends in is used, and all above it."""
        self.uses += 1
        node = self.tree._where.get(keys[-1]) if keys else None
        while node is not None:
            self.used.update(dict.fromkeys(node.keys, self.uses))
            node = node.parent

    @rule(bit=bits, path=paths, skip=st.integers(0, 5))
    def store(self, bit: int, path: Path, skip: int) -> None:
        """Store a path from a depth on; an orphan is refused."""
        skip = min(skip, len(path) - 1)
        keys = keys_of(path)
        parent = keys[skip - 1] if skip else None
        known = self.known[bit]
        new = self.tree.store(bit, parent, keys[skip:], 0.0, served=True)
        if skip and path[:skip] not in known:
            assert new == -1
            return
        before = len(known)
        known.update(prefixes(path))
        assert new == len(known) - before
        self.use(keys)

    @rule(bit=bits, path=paths)
    def serve(self, bit: int, path: Path) -> None:
        keys = keys_of(path)
        self.tree.serve(bit, keys, 0.0)
        self.use(keys[: self.depth(bit, path)])

    @rule(bit=bits, path=paths, data=st.data())
    def evict(self, bit: int, path: Path, data: st.DataObject) -> None:
        """Some blocks of a path go, in any order; what is below them goes too, and is named."""
        gone = data.draw(st.permutations(prefixes(path)))[: data.draw(st.integers(1, len(path)))]
        lost = set().union(*(below(self.known[bit], path) for path in gone))
        self.known[bit] -= lost
        runs = self.tree.evict(bit, [keys_of(path)[-1] for path in gone])
        named = [key for _, run in runs for key in run]
        assert sorted(named) == sorted(keys_of(path)[-1] for path in lost)
        parents = {keys_of(path)[-1]: keys_of(path[:-1])[-1:] for path in lost}
        for parent, run in runs:
            for key in run:
                assert parents[key] == ([] if parent is None else [parent])
                parent = key

    @rule(limit=st.integers(4, 20))
    def forget(self, limit: int) -> None:
        """Of the runs that are leaves, the least recently used one goes, tail first."""
        names = {keys_of(path)[-1]: path for path in self.everywhere()}
        wanted = []
        while len(names) > limit:
            parents = {path[:-1] for path in names.values()}
            leaves = [key for key, path in names.items() if path not in parents]
            key = min(leaves, key=self.used.__getitem__)
            path = names.pop(key)
            wanted += [(bit, key) for bit in BITS if path in self.known[bit]]
            for known in self.known.values():
                known.discard(path)
        losses = self.tree.forget(limit)
        assert sorted((bit, key) for bit, (_, run) in losses for key in run) == sorted(wanted)

    @rule(bit=bits)
    def remove(self, bit: int) -> None:
        self.tree.remove(bit)
        self.known[bit] = set()

    @rule(bit=bits, source=bits, gone=st.booleans())
    def inherit(self, bit: int, source: int, gone: bool) -> None:
        """In place of all that it had, and as another one if it was gone in between."""
        if bit != source:
            self.tree.remove(bit)
            if gone:
                self.tree.leave(bit)
            self.tree.inherit(bit, source)
            self.known[bit] = set(self.known[source])

    @rule(path=paths, among=st.integers(0, 7))
    def match(self, path: Path, among: int) -> None:
        found: dict[int, int] = {}
        for group, depth in self.tree.match(keys_of(path), among):
            for bit in BITS:
                if group & bit:
                    assert bit not in found
                    found[bit] = depth
        assert found == {bit: self.depth(bit, path) for bit in BITS if among & bit}

    @rule(bit=bits, path=paths)
    def ends(self, bit: int, path: Path) -> None:
        """`holds`, `deepest` and `fork`."""
        known, keys = self.known[bit], keys_of(path)
        assert self.tree.holds(bit, keys[-1]) == (path in known)
        assert self.tree.deepest(bit, keys[-1]) == (below(known, path) == {path})
        forks = [len(at) - 1 for at in prefixes(path) if at in known and self.sibling(at) in known]
        assert self.tree.fork(bit, keys) == max(forks, default=0)

    @staticmethod
    def sibling(path: Path) -> Path:
        return (*path[:-1], 1 - path[-1])

    @invariant()
    def agrees(self) -> None:
        assert len(self.tree) == len(self.everywhere())
        for bit in BITS:
            held = [key for run in self.tree.held(bit) for key in run]
            assert sorted(held) == sorted(keys_of(path)[-1] for path in self.known[bit])
            assert self.tree.count(bit) == len(held)

    @invariant()
    def matches_what_is_short(self) -> None:
        for path in SHORT:
            self.match(path, 7)

    @invariant()
    def is_well_formed(self) -> None:
        tree, seen = self.tree, set()
        place = {node: at for at, node in enumerate(tree._order)}
        stack = list(tree.root.children.values())
        while stack:
            node = stack.pop()
            seen.add(node)
            assert node.parent and node.parent.children[node.keys[0]] is node
            assert all(tree._where[key] is node for key in node.keys)
            assert all(0 < n < len(node.keys) for n in node.partial.values())
            assert not node.full & sum(node.partial)
            assert node.full  # no end of a run is nobody's
            for child in node.children.values():
                assert place[child] < place[node]
                assert sum(child.bits()) & ~node.full == 0
                stack.append(child)
        assert seen == set(place)
        assert len(tree._where) == sum(len(node.keys) for node in seen)


def test_those_that_get_the_same_blocks_share_the_nodes_of_one() -> None:
    tree, stranger = PrefixTree(), 8
    tree.store(1, None, [1, 2], 0.0, served=True)
    for heir in (2, 4):
        tree.inherit(heir, 1)
    for key in range(3, 9):
        for bit in (1, 2, 4):
            assert tree.store(bit, key - 1, [key], 0.0, served=bit == 1) == 1
    assert len(tree._order) == 1 and tree.match(range(1, 9), 15) == [(8, 0), (7, 8)]
    tree.evict(1, [8, 7])
    assert sorted(tree.match(range(1, 9), 7)) == [(1, 6), (6, 8)]
    tree.store(stranger, None, range(1, 9), 0.0, served=True)
    tree.store(4, 8, [9], 0.0, served=True)
    assert len(tree._order) == 2, "of others it knows nothing"
    tree.remove(stranger)
    tree.leave(4)
    tree.store(1, 6, [7, 8], 0.0, served=True)
    tree.remove(4)
    tree.inherit(stranger, 2)
    for bit in (2, stranger, 1):
        tree.store(bit, 8, [10], 0.0, served=True)
    assert len(tree._order) == 1
    (node,) = tree._order
    with pytest.raises(Inconsistent):
        tree.store(1, 10, [11, 3], 0.0, served=True)
    assert (node.full, node.partial, node.keys[-1], len(tree)) == (1 | 2 | stranger, {}, 10, 9)


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPrefixTree = TreeMachine.TestCase
