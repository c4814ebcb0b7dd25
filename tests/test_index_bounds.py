"""An index with a limit: it forgets blocks, coldest first, and never says more than is true."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.index.index import Index

HOLDERS = [Holder("a"), Holder("b"), Holder("silent")]
LIFE_S = 10.0
SEED = root("m")
Path = tuple[int, ...]
reporters = st.sampled_from(HOLDERS[:2])
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path) -> list[int]:
    return block_keys(b"".join(token.to_bytes(4, "little") for token in path), 1, SEED)


def key_of(path: Path) -> int:
    return keys_of(path)[-1]


def blocks(path: Path) -> list[Path]:
    return [path[: end + 1] for end in range(len(path))]


PARENTS = {
    key_of(path): key_of(path[:-1]) if path[:-1] else None
    for leaf in range(32)
    for path in blocks(tuple(leaf >> i & 1 for i in range(5)))
}


class BoundMachine(RuleBasedStateMachine):
    """`truth` is what each holder has at most: nothing in it is forgotten."""

    @initialize(limit=st.integers(1, 12))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.now = 0.0
        self.index = Index(limit, prediction_s=LIFE_S)
        self.truth: dict[Holder, Counter[Path]] = {holder: Counter() for holder in HOLDERS}
        self.soon: dict[Holder, set[Path]] = {holder: set() for holder in HOLDERS}
        self.forgotten = 0
        for holder in HOLDERS:
            self.index.add(holder, capacity=9)
        for holder in HOLDERS[:2]:
            self.index.replace(holder, [], self.now)

    @rule(holder=reporters, path=paths, skip=st.integers(0, 4))
    def store(self, holder: Holder, path: Path, skip: int) -> None:
        skip = min(skip, len(path) - 1)
        keys = keys_of(path)
        parent = keys[skip - 1] if skip else None
        self.index.store(holder, parent, keys[skip:], self.now)
        self.truth[holder].update(blocks(path)[skip:])

    @rule(holder=reporters, path=paths, kept=st.integers(0, 4))
    def evict(self, holder: Holder, path: Path, kept: int) -> None:
        gone = blocks(path)[kept:][::-1]
        self.index.evict(holder, [key_of(path) for path in gone])
        self.truth[holder] -= Counter(gone)

    @rule(holder=reporters, some=st.lists(paths, max_size=4))
    def replace(self, holder: Holder, some: list[Path]) -> None:
        self.index.replace(holder, [(None, keys_of(path)) for path in some], self.now)
        self.truth[holder] = Counter(block for path in some for block in blocks(path))

    @rule(holder=st.sampled_from(HOLDERS), path=paths)
    def predict(self, holder: Holder, path: Path) -> None:
        self.index.predict(holder, keys_of(path), self.now)
        self.soon[holder].update(blocks(path))

    @rule(holder=st.sampled_from(HOLDERS), path=paths, have=st.integers(0, 4))
    def missed(self, holder: Holder, path: Path, have: int) -> None:
        self.index.missed(holder, keys_of(path), min(have, len(path) - 1), self.now)
        self.soon[holder].update(blocks(path) if holder == HOLDERS[2] else ())

    @rule(holder=st.sampled_from(HOLDERS), path=paths)
    def withdraw(self, holder: Holder, path: Path) -> None:
        self.index.withdraw(holder, keys_of(path))

    @rule()
    def wait(self) -> None:
        self.now += LIFE_S
        self.index.expire(self.now)
        assert self.index.predicted_blocks == 0
        for holder in HOLDERS[:2]:
            self.soon[holder].clear()

    @rule(holder=st.sampled_from(HOLDERS))
    def clear(self, holder: Holder) -> None:
        self.index.clear(holder)
        self.truth[holder].clear()
        self.soon[holder].clear()

    @invariant()
    def stays_within_its_limit(self) -> None:
        index = self.index
        orphans = [key for some in index._orphans.values() for key in some]
        assert index.blocks + index.predicted_blocks + len(orphans) <= self.limit
        if index.forgotten > self.forgotten:  # predictions go first
            assert index.predicted_blocks == len(orphans) == 0
            assert index.blocks == self.limit
        self.forgotten = index.forgotten

    @invariant()
    def remembers_nothing_of_what_it_forgot(self) -> None:
        held = [self.index.held(holder) for holder in HOLDERS]
        copies = sum(map(len, self.index._copies.values()))
        assert copies <= sum(map(len, held))
        assert sum(map(len, self.index._history._paths.values())) <= len(held[2])

    @invariant()
    def says_no_more_than_is_true(self) -> None:
        for holder in HOLDERS:
            truth, soon = set(self.truth[holder]), self.soon[holder]
            believed = truth if holder in HOLDERS[:2] else soon
            assert self.index.held(holder) <= {key_of(path) for path in believed}
            bit = self.index._bits[holder]
            reached = {key for run in self.index._reported.held(bit) for key in run}
            assert {PARENTS[key] for key in reached} <= reached | {None}
            for leaf in range(32):
                path = tuple(leaf >> i & 1 for i in range(5))
                most = max(sum(b in layer for b in blocks(path)) for layer in (truth, soon))
                assert self.index.match(keys_of(path)).depth(holder) <= most


BoundMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
TestBound = BoundMachine.TestCase


def test_what_one_of_two_holders_loses_in_the_middle_counts_beside_the_tree() -> None:
    index = Index(2)
    for holder in HOLDERS[:2]:
        index.add(holder)
        index.replace(holder, [(None, keys_of((1, 0)))], 0.0)
    assert (index.blocks, index.held_count(HOLDERS[0])) == (2, 2)
    index.evict(HOLDERS[0], [key_of((1,))])
    assert index.blocks + index.held_count(HOLDERS[0]) <= 2
    assert index.match(keys_of((1, 0))).depth(HOLDERS[1]) == 2


@pytest.mark.parametrize("length", [1, 3])
@given(
    uses=st.lists(st.tuples(reporters, st.integers(0, 7), st.booleans()), max_size=60),
    limit=st.integers(1, 12),
)
def test_the_coldest_blocks_go_first_tails_first(
    length: int, uses: list[tuple[Holder, int, bool]], limit: int
) -> None:
    """Of branches that share nothing; a prompt that is sent to a holder warms what it has."""
    index = Index(limit)
    for holder in HOLDERS[:2]:
        index.add(holder)
    branches = [keys_of((name,) * length) for name in range(8)]
    blocks: OrderedDict[int, set[Holder]] = OrderedDict()  # coldest first; tails before heads
    forgotten = 0
    for now, (holder, name, stores) in enumerate(uses):
        branch = branches[name]
        if stores:
            index.store(holder, None, branch, float(now))
        else:
            index.predict(holder, branch, float(now))
        touched = stores or (branch[0] in blocks and holder in blocks[branch[0]])
        for key in reversed(branch) if touched else ():
            if stores:
                blocks.setdefault(key, set()).add(holder)
            if key in blocks:
                blocks.move_to_end(key)
        while len(blocks) > limit:
            blocks.popitem(last=False)
            forgotten += 1
        for known in HOLDERS[:2]:
            assert index.held(known) == {key for key, who in blocks.items() if known in who}
    assert index.forgotten == forgotten


def test_a_prediction_gives_way_to_a_report_the_first_one_first() -> None:
    index = Index(limit=6)
    a = HOLDERS[0]
    index.add(a)
    first, second, stored = keys_of((0, 0)), keys_of((1, 0)), keys_of((2, 0, 0, 0))
    index.predict(a, first, 0.0)
    index.predict(a, second, 1.0)
    index.store(a, None, stored, 2.0)
    depths = [index.match(keys).depth(a) for keys in (first, second, stored)]
    assert (depths, index.forgotten) == ([0, 2, 4], 0)
    index.store(a, stored[-1], [1], 3.0)
    assert (index.predicted_blocks, index.blocks, index.forgotten) == (0, 5, 0)


def test_a_holder_whose_blocks_are_forgotten_stays() -> None:
    index = Index(limit=3)
    a, b = HOLDERS[:2]
    index.add(a)
    index.add(b)
    index.store(a, None, keys_of((0, 0, 0)), 0.0)
    index.store(b, None, keys_of((1, 0, 0)), 1.0)
    assert (index.held_count(a), index.held_count(b), index.forgotten) == (0, 3, 3)
    index.evict(a, keys_of((0, 0, 0))[::-1])  # it has not forgotten them itself
    index.store(a, None, keys_of((0, 1)), 2.0)
    assert index.match(keys_of((0, 1))).depth(a) == 2


def test_a_full_index_keeps_the_freshest_predictions() -> None:
    """Or no sibling of a burst would find the others while the index is full, which is always."""
    index = Index(limit=160)
    index.add(HOLDERS[0])
    index.replace(HOLDERS[0], [], 0.0)
    for serial in range(100):
        space = root("m", salt=str(serial))
        index.store(HOLDERS[0], None, block_keys(bytes(4 * 5), 1, space), float(serial))
    assert index.blocks == 160
    burst = [block_keys(bytes(4 * 5), 1, root("burst", salt=str(serial))) for serial in range(9)]
    for serial, keys in enumerate(burst):
        index.predict(HOLDERS[0], keys, 100.0 + serial)
        assert index.match(keys).depth(HOLDERS[0]) == 5
    assert index.blocks + index.predicted_blocks <= 160
    depths = [index.match(keys).depth(HOLDERS[0]) for keys in burst]
    assert depths == [0] * 7 + [5] * 2  # a sixteenth of the limit


def test_a_snapshot_of_what_nobody_asked_for_displaces_nothing() -> None:
    hot, cold = HOLDERS[:2]
    index = Index(limit=100)
    for holder in (hot, cold):
        index.add(holder)
        index.replace(holder, [], 0.0)
    used = block_keys(bytes(4 * 50), 1, SEED)
    index.store(hot, None, used, 0.0)
    snapshot = [block_keys(bytes(4 * 10), 1, root("m", salt=str(i))) for i in range(10)]
    index.replace(cold, [(None, run) for run in snapshot], 1.0)
    assert index.match(used).depth(hot) == 50
    assert index.held_count(cold) == 50


def test_what_was_forgotten_is_learned_again_from_those_who_find_it() -> None:
    index = Index(limit=20)
    index.add(HOLDERS[0])
    index.replace(HOLDERS[0], [], 0.0)
    old = block_keys(bytes(4 * 10), 1, SEED)
    index.store(HOLDERS[0], None, old, 0.0)
    for serial in range(9):
        fresh = block_keys(bytes(4 * 10), 1, root("m", salt=str(serial)))
        index.store(HOLDERS[0], None, fresh, 1.0)
    assert index.match(old).depth(HOLDERS[0]) == 0
    index.computed(HOLDERS[0], old, 8, 2.0)  # the engine said that it had eight
    assert index.match(old).depth(HOLDERS[0]) == 8
    assert index.blocks == 20
