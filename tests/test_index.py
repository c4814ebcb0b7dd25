"""The index against dictionaries of sets, under every order of events."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from hotbranch.keys import block_keys, root
from router.index.index import Index

HOLDERS = ["a", "b", "c"]
LIFE_S = 10.0
SEED = root("m")
holders = st.sampled_from(HOLDERS)
# two letters, so that paths share, fork and end within each other
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
Path = tuple[int, ...]


def keys_of(path: Path) -> list[int]:
    tokens = b"".join(token.to_bytes(4, "little") for token in path)
    return block_keys(tokens, 1, SEED)


def prefixes(path: Path) -> list[Path]:
    return [path[: end + 1] for end in range(len(path))]


class Holder:
    """What a holder reported, and the paths predicted for it with the end of their lives."""

    def __init__(self) -> None:
        self.reported: set[Path] = set()
        self.predicted: dict[Path, tuple[float, int]] = {}  # end of life, claims

    def soon(self) -> set[Path]:
        return {prefix for path in self.predicted for prefix in prefixes(path)}

    def depth(self, path: Path) -> int:
        layers = (self.reported, self.soon())
        return max(sum(prefix in layer for prefix in prefixes(path)) for layer in layers)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.now = 0.0
        self.model: dict[str, Holder] = {}
        for holder in HOLDERS:
            self.index.add(holder)
            self.model[holder] = Holder()

    @rule(holder=holders)
    def replace_holder(self, holder: str) -> None:
        """Gone for good; another one takes its place."""
        self.index.remove(holder)
        assert self.index.match(keys_of((0,))).depth(holder) == 0
        self.index.add(holder)
        self.model[holder] = Holder()

    @rule(holder=holders, path=paths)
    def store(self, holder: str, path: Path) -> None:
        self.index.store(holder, SEED, keys_of(path))
        self.model[holder].reported.update(prefixes(path))

    @rule(holder=holders, path=paths, kept=st.integers(0, 4))
    def evict(self, holder: str, path: Path, kept: int) -> None:
        """The end of a path goes, and all that hangs below any of it."""
        self.index.evict(holder, keys_of(path)[kept:][::-1])
        gone = prefixes(path)[kept:]
        self.model[holder].reported -= {
            p for p in self.model[holder].reported if any(p[: len(g)] == g for g in gone)
        }

    @rule(holder=holders, kept=st.lists(paths, max_size=3))
    def replace(self, holder: str, kept: list[Path]) -> None:
        self.index.replace(holder, [(SEED, keys_of(path)) for path in kept])
        self.model[holder].reported = {p for path in kept for p in prefixes(path)}

    @rule(holder=holders)
    def clear(self, holder: str) -> None:
        self.index.clear(holder)
        self.model[holder] = Holder()

    @rule(holder=holders, some=st.lists(paths, min_size=1, max_size=3))
    def predict(self, holder: str, some: list[Path]) -> None:
        for path in some:
            self.index.predict(holder, SEED, keys_of(path), self.now + LIFE_S)
            _, claims = self.model[holder].predicted.get(path, (0.0, 0))
            self.model[holder].predicted[path] = self.now + LIFE_S, claims + 1

    @rule(holder=holders, path=paths)
    def withdraw(self, holder: str, path: Path) -> None:
        self.index.withdraw(holder, keys_of(path))
        end, claims = self.model[holder].predicted.pop(path, (0.0, 0))
        if claims > 1:
            self.model[holder].predicted[path] = end, claims - 1

    @rule(holder=holders, data=st.data())
    def withdraw_a_live_one(self, holder: str, data: st.DataObject) -> None:
        if live := sorted(self.model[holder].predicted):
            self.withdraw(holder, data.draw(st.sampled_from(live)))

    @rule(seconds=st.sampled_from((0.0, 3.0, 8.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)
        for holder in self.model.values():
            holder.predicted = {p: e for p, e in holder.predicted.items() if e[0] > self.now}

    @rule(path=paths)
    def match(self, path: Path) -> None:
        match = self.index.match(keys_of(path))
        for name, holder in self.model.items():
            assert match.depth(name) == holder.depth(path)

    @invariant()
    def counts_agree(self) -> None:
        for name, holder in self.model.items():
            keys = {keys_of(path)[-1] for path in holder.reported}
            assert self.index.held(name) == keys
            assert self.index.held_count(name) == len(keys)
        reported = (holder.reported for holder in self.model.values())
        assert self.index.blocks == len(set().union(*reported))
        predicted = (holder.soon() for holder in self.model.values())
        assert self.index.predicted_blocks == len(set().union(*predicted))


IndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_hole_ends_the_match() -> None:
    index = Index()
    index.add("a")
    keys = keys_of((0, 1, 2))
    index.store("a", SEED, keys)
    index.evict("a", keys[1:2])
    assert index.match(keys).depth("a") == 1


def test_a_removed_holder_leaves_nothing_to_the_next_in_its_place() -> None:
    index = Index()
    index.add("a")
    index.store("a", SEED, keys_of((0, 1)))
    index.predict("a", SEED, keys_of((2,)), 100.0)
    index.remove("a")
    index.add("b")
    assert index.match(keys_of((0, 1))).depth("b") == 0
    index.expire(1000.0)
    assert index.blocks == index.predicted_blocks == 0


@given(count=st.integers(0, 150), block_size=st.sampled_from((1, 16, 64)), tail=st.integers(0, 63))
def test_keys_chain_block_by_block(count: int, block_size: int, tail: int) -> None:
    tokens = random.Random(count).randbytes(4 * (count * block_size + tail % block_size))
    parent, wanted = SEED, []
    for start in range(0, 4 * block_size * count, 4 * block_size):
        parent = xxh3_64_intdigest(tokens[start : start + 4 * block_size], parent)
        wanted.append(parent)
    assert block_keys(tokens, block_size, SEED) == wanted


def test_namespaces_do_not_meet() -> None:
    tokens = b"\1\0\0\0" * 16
    seeds = {root("m"), root("m", "x"), root("m", "", "x"), root("mx"), root("n")}
    assert len({block_keys(tokens, 16, seed)[0] for seed in seeds}) == 5
