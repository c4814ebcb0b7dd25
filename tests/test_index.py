"""The index against a dictionary of sets, under every order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbranch.keys import block_keys, root
from router.index.index import Index

HOLDERS = ["a", "b", "c"]
holders = st.sampled_from(HOLDERS)
# paths over a small alphabet, so that prefixes are shared
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def keys_of(path: list[int]) -> list[int]:
    tokens = b"".join(token.to_bytes(4, "little") for token in path)
    return block_keys(tokens, 1, root("m"))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.now = 0.0
        self.reported: dict[str, set[int]] = {}
        self.predicted: dict[str, dict[int, list[float]]] = {}  # one expiry for each claim

    @rule(holder=holders)
    def add(self, holder: str) -> None:
        self.index.add(holder)
        self.reported.setdefault(holder, set())
        self.predicted.setdefault(holder, {})

    @rule(holder=holders)
    def remove(self, holder: str) -> None:
        self.index.remove(holder)
        self.reported.pop(holder, None)
        self.predicted.pop(holder, None)

    @rule(holder=holders, path=paths)
    def store(self, holder: str, path: list[int]) -> None:
        if holder in self.reported:
            self.index.store(holder, keys_of(path))
            self.reported[holder].update(keys_of(path))
            for key in keys_of(path):
                self.predicted[holder].pop(key, None)

    @rule(holder=holders, path=paths, start=st.integers(0, 5))
    def evict(self, holder: str, path: list[int], start: int) -> None:
        if holder in self.reported:
            self.index.evict(holder, keys_of(path)[start:])
            self.reported[holder].difference_update(keys_of(path)[start:])

    @rule(holder=holders, kept=st.lists(paths, max_size=3))
    def replace(self, holder: str, kept: list[list[int]]) -> None:
        if holder in self.reported:
            keys = {key for path in kept for key in keys_of(path)}
            self.index.replace(holder, keys)
            self.reported[holder] = keys
            for key in keys:
                self.predicted[holder].pop(key, None)

    @rule(holder=holders)
    def clear(self, holder: str) -> None:
        if holder in self.reported:
            self.index.clear(holder)
            self.reported[holder] = set()
            self.predicted[holder] = {}

    @rule(holder=holders, path=paths)
    def predict(self, holder: str, path: list[int]) -> None:
        if holder in self.reported:
            self.index.predict(holder, keys_of(path), self.now + 10)
            for key in keys_of(path):
                if key not in self.reported[holder]:
                    claims = len(self.predicted[holder].get(key, []))
                    self.predicted[holder][key] = [self.now + 10] * (claims + 1)

    @rule(holder=holders, path=paths)
    def withdraw(self, holder: str, path: list[int]) -> None:
        self.index.withdraw(holder, keys_of(path))
        life = self.predicted.get(holder, {})
        for key in life.keys() & set(keys_of(path)):
            life[key].pop()
            if not life[key]:
                del life[key]

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)
        for life in self.predicted.values():
            for key in [key for key, claims in life.items() if claims[0] <= self.now]:
                del life[key]

    @rule(path=paths, among=st.sets(holders))
    def match(self, path: list[int], among: set[str]) -> None:
        expected = {}
        for holder in among & self.reported.keys():
            known = self.reported[holder] | self.predicted[holder].keys()
            keys = keys_of(path)
            expected[holder] = next((i for i, k in enumerate(keys) if k not in known), len(keys))
        assert self.index.match(keys_of(path), among) == expected

    @invariant()
    def counts_agree(self) -> None:
        for holder, keys in self.reported.items():
            assert self.index.held(holder) == keys
        assert self.index.blocks == len(set().union(*self.reported.values(), set()))
        predicted = [life.keys() for life in self.predicted.values()]
        assert self.index.predicted_blocks == len(set().union(*predicted, set()))


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_hole_ends_the_match() -> None:
    index = Index()
    index.add("a")
    keys = keys_of([0, 1, 2])
    index.store("a", keys)
    index.evict("a", keys[1:2])
    assert index.match(keys, ["a"]) == {"a": 1}


def test_a_removed_holder_leaves_nothing_to_the_next_in_its_place() -> None:
    index = Index()
    index.add("a")
    index.store("a", keys_of([0, 1]))
    index.predict("a", keys_of([2]), 100.0)
    index.remove("a")
    index.add("b")
    assert index.match(keys_of([0, 1]), ["b"]) == {"b": 0}
    index.expire(1000.0)
    assert index.blocks == index.predicted_blocks == 0


def test_namespaces_do_not_meet() -> None:
    tokens = b"\1\0\0\0" * 16
    seeds = {root("m"), root("m", "x"), root("m", "", "x"), root("mx"), root("n")}
    assert len({block_keys(tokens, 16, seed)[0] for seed in seeds}) == 5
