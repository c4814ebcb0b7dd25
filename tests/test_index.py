"""The index against dictionaries of blocks, under every order of events."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.index.index import COMPUTED_S, Index
from router.index.tree import Inconsistent

HOLDERS = [Holder("a", 0), Holder("a", 1), Holder("b")]
LIFE_S = 10.0
SEEDS = (root("m"), root("m", "adapter"))
Path = tuple[int, ...]  # a namespace, then tokens
holders = st.sampled_from(HOLDERS)
disorderly = st.sampled_from(HOLDERS[:2])  # the other's blocks are stored and evicted by the book
# two letters, so that paths share, fork and end within each other
paths = st.builds(
    lambda space, tokens: (space, *tokens),
    st.sampled_from((0, 0, 0, 0, 1)),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


def keys_of(path: Path) -> list[int]:
    tokens = b"".join(token.to_bytes(4, "little") for token in path[1:])
    return block_keys(tokens, 1, SEEDS[path[0]])


def key_of(path: Path) -> int:
    return keys_of(path)[-1]


def blocks(path: Path) -> list[Path]:
    """Those of a path, from the first on, each as the path that ends in it."""
    return [path[:end] for end in range(2, len(path) + 1)]


def run_of(path: Path, skip: int) -> tuple[int | None, list[int], list[Path]]:
    """The end of a path: the key before it, its keys, its blocks."""
    skip = min(skip, len(path) - 2)
    keys = keys_of(path)
    return keys[skip - 1] if skip else None, keys[skip:], blocks(path)[skip:]


class Truth:
    """What a holder reported, and the paths predicted for it with the end of their lives."""

    def __init__(self) -> None:
        self.reported: Counter[Path] = Counter()
        self.predicted: dict[Path, tuple[float, int]] = {}  # end of life, claims

    def soon(self) -> set[Path]:
        return {block for path in self.predicted for block in blocks(path)}

    def counting(self) -> set[Path]:
        """Reported blocks before which all others are there."""
        return {path for path in self.reported if self.reach(path) == len(path) - 1}

    def reach(self, path: Path) -> int:
        """Leading blocks of a path that were reported."""
        whole = blocks(path)
        return next((n for n, b in enumerate(whole) if b not in self.reported), len(whole))

    def depth(self, path: Path) -> int:
        return max(self.reach(path), sum(b in self.soon() for b in blocks(path)))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(prediction_s=LIFE_S)
        self.now = 0.0
        self.model: dict[Holder, Truth] = {}
        for holder in HOLDERS:
            self.add(holder)

    def add(self, holder: Holder) -> None:
        self.index.add(holder, capacity=100)
        self.index.replace(holder, [], self.now)  # it reports: its history is not asked
        self.model[holder] = Truth()

    @rule(holder=holders)
    def replace_holder(self, holder: Holder) -> None:
        """Gone for good; another one takes its place."""
        self.index.remove(holder)
        for path in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert self.index.match(keys_of(path)).depth(holder) == 0
        assert self.index.held(holder) == frozenset()
        assert self.index.held_count(holder) == 0
        self.add(holder)

    @rule(holder=disorderly, path=paths, skip=st.integers(0, 3))
    def store(self, holder: Holder, path: Path, skip: int) -> None:
        """A run is stored, below a block that may not be there, of blocks that may be."""
        parent, keys, run = run_of(path, skip)
        self.index.store(holder, parent, keys, self.now)
        self.model[holder].reported.update(run)

    @rule(holder=holders, path=paths, again=st.integers(0, 2))
    def store_on(self, holder: Holder, path: Path, again: int) -> None:
        """A path is stored from where it ends, or from a few blocks before."""
        self.store(holder, path, max(0, self.model[holder].reach(path) - again))

    @rule(holder=holders, data=st.data())
    def evict_branch(self, holder: Holder, data: st.DataObject) -> None:
        """A block goes and all below it, every copy, children before parents: no orphan is left."""
        if reported := self.model[holder].reported:
            path = data.draw(st.sampled_from(sorted(reported)))
            gone = [other for other in reported.elements() if other[: len(path)] == path]
            self._evict(holder, sorted(gone, key=len, reverse=True))

    @rule(holder=disorderly, path=paths, data=st.data())
    def evict(self, holder: Holder, path: Path, data: st.DataObject) -> None:
        """Some blocks go, in any order; one may be unknown, or named twice."""
        known = sorted({*blocks(path), *self.model[holder].reported})
        gone = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=6))
        self._evict(holder, gone)

    @rule(holder=disorderly, path=paths, kept=st.integers(0, 3))
    def evict_tail(self, holder: Holder, path: Path, kept: int) -> None:
        """Children before parents, as engines do."""
        self._evict(holder, blocks(path)[kept:][::-1])

    def _evict(self, holder: Holder, gone: list[Path]) -> None:
        self.index.evict(holder, [key_of(path) for path in gone])
        reported = self.model[holder].reported
        for path in gone:
            if reported[path]:
                reported[path] -= 1
            if not reported[path]:
                del reported[path]

    @rule(holder=disorderly, runs=st.lists(st.tuples(paths, st.integers(0, 3)), max_size=4))
    def replace(self, holder: Holder, runs: list[tuple[Path, int]]) -> None:
        """A snapshot, in which parents may come after their children, and blocks twice."""
        told = [run_of(path, skip) for path, skip in runs]
        self.index.replace(holder, [(parent, keys) for parent, keys, _ in told], self.now)
        self.model[holder].reported = Counter(block for _, _, run in told for block in run)

    @rule(holder=holders)
    def clear(self, holder: Holder) -> None:
        self.index.clear(holder)
        self.model[holder] = Truth()

    @rule(holder=holders, data=st.data())
    def predict(self, holder: Holder, data: st.DataObject) -> None:
        path = data.draw(st.one_of(paths, self.believed(holder)))
        self.index.predict(holder, keys_of(path), self.now)
        _, claims = self.model[holder].predicted.get(path, (0.0, 0))
        self.model[holder].predicted[path] = self.now + LIFE_S, claims + 1

    @rule(holder=holders, data=st.data())
    def withdraw(self, holder: Holder, data: st.DataObject) -> None:
        path = data.draw(self.believed(holder))
        self.index.withdraw(holder, keys_of(path))
        end, claims = self.model[holder].predicted.pop(path, (0.0, 1))
        if claims != 1:
            self.model[holder].predicted[path] = end, max(0, claims - 1)

    @rule(holder=holders, data=st.data())
    def computed(self, holder: Holder, data: st.DataObject) -> None:
        path = data.draw(self.believed(holder))
        self.index.computed(holder, keys_of(path), 0, self.now)
        if path in self.model[holder].predicted:
            end, claims = self.model[holder].predicted[path]
            end = end if claims > 1 else min(end, self.now + COMPUTED_S)
            self.model[holder].predicted[path] = end, max(0, claims - 1)

    @rule(holder=holders, data=st.data(), have=st.integers(0, 3))
    def missed(self, holder: Holder, data: st.DataObject, have: int) -> None:
        """Whatever goes on from the first block that was not there is not believed any more."""
        path = data.draw(self.believed(holder))
        have = min(have, len(path) - 2)
        self.index.missed(holder, keys_of(path), have, self.now)
        absent, predicted = path[: have + 2], self.model[holder].predicted
        for other in [other for other in predicted if other[: len(absent)] == absent]:
            del predicted[other]

    def believed(self, holder: Holder) -> st.SearchStrategy[Path]:
        """A path that is predicted now, if there is one."""
        return st.sampled_from(sorted(self.model[holder].predicted) or [(0, 0, 0)])

    @rule(seconds=st.sampled_from((0.0, 1.0, 3.0, 8.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)
        for holder in self.model.values():
            holder.predicted = {p: e for p, e in holder.predicted.items() if e[0] > self.now}

    @rule(some=st.lists(paths, min_size=4, max_size=8))
    def match(self, some: list[Path]) -> None:
        for path in some:
            match = self.index.match(keys_of(path))
            for holder, truth in self.model.items():
                assert match.depth(holder) == truth.depth(path)
            assert match.depth(Holder("unknown")) == 0

    @invariant()
    def counts_agree(self) -> None:
        for holder, truth in self.model.items():
            keys = {key_of(path) for path in truth.reported}
            assert self.index.held(holder) == keys
            assert self.index.held_count(holder) == len(keys)
        reported = (truth.counting() for truth in self.model.values())
        assert self.index.blocks == len(set().union(*reported))
        for orphans in self.index._orphans.values():
            assert len(orphans) and all(orphans._children.values())  # no litter
        predicted = (truth.soon() for truth in self.model.values())
        assert self.index.predicted_blocks == len(set().union(*predicted))

    def teardown(self) -> None:
        for holder in HOLDERS:
            self.index.remove(holder)
        assert (self.index.blocks, self.index.predicted_blocks) == (0, 0)
        assert not self.index._copies
        assert not self.index._orphans


IndexMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestIndex = IndexMachine.TestCase


def reporting(*holders: Holder) -> Index:
    index = Index()
    for holder in holders:
        index.add(holder)
    return index


A = Holder("a")
PATH = (0, 0, 1, 0)


def test_a_hole_ends_the_match_until_it_is_filled() -> None:
    index = reporting(A)
    keys = keys_of(PATH)
    index.store(A, None, keys, 0.0)
    index.evict(A, keys[1:2])
    assert index.match(keys).depth(A) == 1
    assert index.held(A) == {keys[0], keys[2]}
    index.store(A, keys[0], keys[1:2], 0.0)
    assert index.match(keys).depth(A) == 3


def test_a_block_that_is_stored_twice_is_there_until_it_has_been_evicted_twice() -> None:
    index = reporting(A)
    keys = keys_of(PATH)
    index.store(A, None, keys[:2], 0.0)
    index.store(A, None, keys, 0.0)
    index.evict(A, keys[::-1])
    assert index.match(keys).depth(A) == index.held_count(A) == 2
    index.evict(A, keys[::-1])
    assert index.match(keys).depth(A) == index.held_count(A) == 0


def test_a_run_below_an_unknown_block_counts_once_that_is_stored() -> None:
    index = reporting(A)
    keys = keys_of(PATH)
    index.store(A, keys[0], keys[1:], 0.0)
    assert index.match(keys).depth(A) == 0
    assert (index.held_count(A), index.blocks) == (2, 0)
    index.store(A, None, keys[:1], 0.0)
    assert index.match(keys).depth(A) == 3


def test_a_miss_takes_back_only_what_was_believed() -> None:
    index = reporting(A)
    keys = keys_of((0, 0, 1, 0, 1))
    index.store(A, None, keys[:2], 0.0)
    index.predict(A, keys, 0.0)
    index.missed(A, keys, 1, 0.0)
    assert index.match(keys).depth(A) == 2  # reported: the replica knows better than one prompt


def test_nobody_counts_on_what_was_missed() -> None:
    index = reporting(A)
    keys = keys_of(PATH)
    index.predict(A, keys, 0.0)
    index.missed(A, keys, 1, 0.0)
    assert index.predicted_blocks == 0
    index.predict(A, keys, 0.0)
    index.withdraw(A, keys)
    assert index.predicted_blocks == 0


def test_a_prediction_that_is_renewed_lives_on() -> None:
    index = Index(prediction_s=LIFE_S)
    index.add(A)
    keys = keys_of(PATH)
    index.predict(A, keys, 0.0)
    index.predict(A, keys, 6.0)
    index.expire(LIFE_S)
    assert index.match(keys).depth(A) == 3
    index.expire(LIFE_S + 6.0)
    assert index.match(keys).depth(A) == 0


def test_to_be_computed_prolongs_no_life() -> None:
    index = Index(prediction_s=LIFE_S)
    index.add(A)
    keys = keys_of(PATH)
    index.predict(A, keys, 0.0)
    index.computed(A, keys, 0, LIFE_S - COMPUTED_S / 2)
    index.expire(LIFE_S)
    assert index.predicted_blocks == 0


def test_ranks_of_one_replica_are_told_apart() -> None:
    index = reporting(Holder("a", 0), Holder("a", 1))
    keys = keys_of(PATH)
    index.store(Holder("a", 1), None, keys, 0.0)
    match = index.match(keys)
    assert (match.depth(Holder("a", 0)), match.depth(Holder("a", 1))) == (0, 3)


def test_a_removed_holder_leaves_nothing_to_the_next_in_its_place() -> None:
    index = reporting(A)
    keys, soon = keys_of((0, 0, 1)), keys_of((0, 1))
    index.store(A, None, keys, 0.0)
    index.store(A, None, keys, 0.0)  # copies
    index.store(A, keys[-1] + 1, [1, 2], 0.0)  # orphans
    index.predict(A, soon, 0.0)
    index.remove(A)
    b = Holder("b")
    index.add(b)
    assert index.match(keys).depth(b) == index.match(soon).depth(b) == index.held_count(b) == 0
    index.store(b, None, keys, 0.0)
    index.evict(b, keys[::-1])
    index.expire(1000.0)
    assert index.held_count(b) == index.blocks == index.predicted_blocks == 0


def test_field_report_21_blocks_of_64_tokens_earn_credit_in_whole_64s() -> None:
    """Of 100 tokens that both hold, the one with large blocks can reuse but 64."""
    coarse, fine = Holder("coarse"), Holder("fine")
    index = Index()
    index.add(coarse, block_size=64)
    index.add(fine, block_size=16)
    tokens = random.Random(21).randbytes(4 * 1000)
    index.store(coarse, None, block_keys(tokens, 64, SEEDS[0]), 0.0)
    index.store(fine, None, block_keys(tokens, 16, SEEDS[0]), 0.0)
    for length in (15, 16, 63, 64, 100, 128, 1000):
        prompt = tokens[: 4 * length] + bytes(4 * 200)
        for holder, size in ((coarse, 64), (fine, 16)):
            match = index.match(block_keys(prompt, size, SEEDS[0]))
            assert match.depth(holder) * size == length // size * size
            assert match.depth(fine if holder is coarse else coarse) == 0


@given(count=st.integers(0, 150), block_size=st.sampled_from((1, 16, 64)), tail=st.integers(0, 63))
def test_keys_chain_block_by_block(count: int, block_size: int, tail: int) -> None:
    tokens = random.Random(count).randbytes(4 * (count * block_size + tail % block_size))
    parent, wanted = SEEDS[0], []
    for start in range(0, 4 * block_size * count, 4 * block_size):
        parent = xxh3_64_intdigest(tokens[start : start + 4 * block_size], parent)
        wanted.append(parent)
    assert block_keys(tokens, block_size, SEEDS[0]) == wanted


def test_namespaces_do_not_meet() -> None:
    tokens = b"\1\0\0\0" * 16
    seeds = {root("m"), root("m", "x"), root("m", "", "x"), root("mx"), root("n")}
    assert len({block_keys(tokens, 16, seed)[0] for seed in seeds}) == 5


def test_every_depth_is_found_where_each_of_many_holders_has_its_own() -> None:
    index = Index()
    many = [Holder(f"r{number}", number % 2) for number in range(60)]
    keys = keys_of((0,) * 62)
    for depth, holder in enumerate(many):
        index.add(holder)
        index.store(holder, None, keys[:depth], 0.0)
        index.predict(holder, keys[: depth // 2 + 20], 0.0)
    match = index.match(keys)
    depths = [match.depth(holder) for holder in many]
    assert depths == [max(depth, depth // 2 + 20) for depth in range(60)]
    assert match.depth(Holder("unknown")) == 0


def test_a_key_in_two_places_is_refused_and_harms_nobody() -> None:
    index = Index(limit=6)
    other = Holder("b")
    for holder in (A, other):
        index.add(holder)
    index.store(A, None, [1, 2], 0.0)
    for run in ([3, 2], [7, 7], [8, 9, 8]):
        with pytest.raises(Inconsistent):
            index.store(A, None, run, 0.0)
    assert index.match([1, 2]).depth(A) == 2
    for number in range(100, 140, 4):
        index.store(other, None, range(number, number + 4), 0.0)
    assert index.blocks <= 6
    index.clear(A)
    index.remove(A)
    index.remove(other)
    assert index.blocks == 0


def test_a_snapshot_keeps_the_heat_of_what_is_still_there() -> None:
    index = Index()
    index.add(A, capacity=100)
    index.replace(A, [(None, [1, 2]), (None, [5])], 0.0)
    index.predict(A, [1, 2, 3], 1.0)
    (before,) = index.hottest(10, 2.0)
    index.replace(A, [(None, [1, 2, 3])], 2.0)
    (after,) = index.hottest(10, 2.0)
    assert before.rate == after.rate > 0
