"""The tree of holders against sets of paths."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbranch.keys import block_keys, root
from router.index.tree import PrefixTree

BITS = (1, 2, 4)
bits = st.sampled_from(BITS)
# two letters, so that paths share, fork and end within each other
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6)
SEED = root("m")


def keys_of(path: list[int]) -> list[int]:
    return block_keys(b"".join(block.to_bytes(4, "little") for block in path), 1, SEED)


def closed(known: set[tuple[int, ...]], path: tuple[int, ...]) -> int:
    """Leading blocks of a path that are known."""
    return next((n for n in range(len(path)) if path[: n + 1] not in known), len(path))


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.known: dict[int, set[tuple[int, ...]]] = {bit: set() for bit in BITS}

    @rule(bit=bits, path=paths, skip=st.integers(0, 5))
    def store(self, bit: int, path: list[int], skip: int) -> None:
        """Store a path from the depth on at which the holder ends, or deeper, as an orphan."""
        skip = min(skip, len(path) - 1)
        keys = keys_of(path)
        parent = keys[skip - 1] if skip else SEED
        known = self.known[bit]
        before = len(known)
        everywhere = set().union(*self.known.values())
        if skip == 0 or tuple(path[:skip]) in known:
            known.update(tuple(path[: n + 1]) for n in range(skip, len(path)))
        elif tuple(path[:skip]) not in everywhere:
            return  # an unknown parent reads as a root
        assert self.tree.store(bit, parent, keys[skip:]) == len(known) - before

    @rule(bit=bits, path=paths, tail=st.integers(1, 6))
    def evict(self, bit: int, path: list[int], tail: int) -> None:
        gone = [tuple(path[: n + 1]) for n in range(len(path))][-tail:]
        known = self.known[bit]
        left = {p for p in known if not any(p[: len(g)] == g for g in gone)}
        keys = keys_of(path)[-tail:][::-1]
        assert self.tree.evict(bit, keys) == len(known) - len(left)
        self.known[bit] = left

    @rule(bit=bits)
    def remove(self, bit: int) -> None:
        self.tree.remove(bit)
        self.known[bit] = set()

    @rule(path=paths, among=st.integers(0, 7))
    def match(self, path: list[int], among: int) -> None:
        found: dict[int, int] = {}
        for group, depth in self.tree.match(keys_of(path), among):
            for bit in BITS:
                if group & bit:
                    assert bit not in found
                    found[bit] = depth
        wanted = {bit: closed(self.known[bit], tuple(path)) for bit in BITS if among & bit}
        assert found == wanted

    @rule(bit=bits, path=paths)
    def deepest(self, bit: int, path: list[int]) -> None:
        known, p = self.known[bit], tuple(path)
        below = any(q[: len(p)] == p and len(q) > len(p) for q in known)
        assert self.tree.deepest(bit, keys_of(path)[-1]) == (p in known and not below)

    @invariant()
    def agrees(self) -> None:
        assert len(self.tree) == len(set().union(*self.known.values()))
        for bit in BITS:
            held = [key for run in self.tree.held(bit) for key in run]
            assert sorted(held) == sorted(keys_of(list(p))[-1] for p in self.known[bit])


TreeMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestPrefixTree = TreeMachine.TestCase
