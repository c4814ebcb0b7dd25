"""How hot branches are, against sums over everything that was served."""

from collections.abc import Iterator, Sequence
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.index.branches import Branch
from router.index.heat import HEAT_S
from router.index.index import Index

SIZES = {Holder("fine", 0): 16, Holder("fine", 1): 16, Holder("coarse"): 64}
SEED = root("m")
Path = tuple[int, ...]
Event = tuple[float, Holder, Path, int]
"""When, who, and the tokens served on a path."""

holders = st.sampled_from(list(SIZES))
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path, size: int) -> list[int]:
    """Each element of the path stands for a block of equal tokens."""
    return block_keys(b"".join(token.to_bytes(4, "little") * size for token in path), size, SEED)


def prefixes(path: Path) -> list[Path]:
    return [path[: end + 1] for end in range(len(path))]


def names(size: int) -> dict[int, Path]:
    """The paths of all keys there can be."""
    leaves = [tuple(leaf >> i & 1 for i in range(5)) for leaf in range(32)]
    return {keys_of(path, size)[-1]: path for leaf in leaves for path in prefixes(leaf)}


PATHS = {key: (path, size) for size in (16, 64) for key, path in names(size).items()}


def walk(branches: Sequence[Branch]) -> Iterator[tuple[Branch | None, Branch]]:
    """Every branch with the one above it."""
    stack: list[tuple[Branch | None, Branch]] = [(None, branch) for branch in branches]
    while stack:
        above, branch = stack.pop()
        yield above, branch
        stack += [(branch, child) for child in branch.children]


def first_block(branch: Branch) -> tuple[Path, int]:
    """The path to it, and the block size."""
    path, size = PATHS[branch.key]
    assert branch.end == len(path) * size
    assert branch.start % size == 0
    return path[: branch.start // size + 1], size


def span(branch: Branch) -> list[tuple[Path, int]]:
    """All blocks of it."""
    path, size = PATHS[branch.key]
    return [(block, size) for block in prefixes(path) if len(block) * size > branch.start]


def rates(events: Sequence[Event], block: Path, size: int, now: float) -> dict[Holder, float]:
    """Tokens a second that each holder serves to prompts that go through a block."""
    found: dict[Holder, float] = {}
    for when, holder, path, tokens in events:
        if SIZES[holder] == size and path[: len(block)] == block:
            weight = exp((when - now) / HEAT_S) / HEAT_S
            found[holder] = found.get(holder, 0.0) + tokens * weight
    return found


def stocked(held: dict[Holder, list[Path]]) -> Index:
    index = Index()
    for holder, size in SIZES.items():
        index.add(holder, block_size=size)
        index.replace(holder, [(None, keys_of(path, size)) for path in held[holder]], 0.0)
    return index


stocks = st.fixed_dictionaries(
    {holder: st.lists(paths, max_size=6, unique=True) for holder in SIZES}
)
served = st.lists(st.tuples(st.floats(0, 100), holders, paths), max_size=30)


@settings(max_examples=200, deadline=None)
@given(held=stocks, served=served, limit=st.integers(0, 12))
def test_the_hottest_are_those_that_served_most(
    held: dict[Holder, list[Path]], served: list[tuple[float, Holder, Path]], limit: int
) -> None:
    """Of a tree that no longer changes: a snapshot warms nothing, what is served later does."""
    index = stocked(held)
    has = {holder: {b for path in held[holder] for b in prefixes(path)} for holder in SIZES}
    events: list[Event] = []
    now = 0.0
    for seconds, holder, path in served:
        now += seconds
        index.predict(holder, keys_of(path, SIZES[holder]), now)
        depth = sum(prefix in has[holder] for prefix in prefixes(path))
        events.append((now, holder, path[:depth], depth * SIZES[holder]))
    now += 5.0
    everything = [branch for _, branch in walk(index.hottest(1000, now))]
    for branch in everything:
        block, size = first_block(branch)
        assert branch.rates == pytest.approx(rates(events, block, size, now))
        run, _ = PATHS[branch.key]
        for holder, tokens in branch.held.items():
            here = [path for path in prefixes(run) if path in has[holder]]
            assert tokens == (len(here) - len(block) + 1) * size
    warm = {(block, SIZES[holder]) for _, holder, path, _ in events for block in prefixes(path)}
    assert {first_block(branch) for branch in everything} <= warm
    assert warm <= {block for branch in everything for block in span(branch)}

    best = sorted((branch.rate for branch in everything), reverse=True)[:limit]
    found = list(walk(index.hottest(limit, now)))
    assert sorted((b.rate for _, b in found), reverse=True) == pytest.approx(best)
    for above, branch in found:
        assert branch.start == (above.end if above else 0)
        assert above is None or above.rate >= branch.rate * (1 - 1e-9)
    siblings = [branch.children for _, branch in found] + [index.hottest(limit, now)]
    for some in siblings:
        assert some == sorted(some, key=lambda b: -b.rate)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(0, 50),
            holders,
            paths,
            st.sampled_from(("store", "store", "predict", "predict", "evict", "remove")),
        ),
        min_size=8,
        max_size=30,
    )
)
def test_a_tree_that_changes_keeps_its_heat(
    steps: list[tuple[float, Holder, Path, str]],
) -> None:
    """A run that is split leaves its heat to both parts, so the lower one may be held for hotter
    than it is, never for colder; a block that was evicted or whose holder went begins anew.
    """
    index = stocked({holder: [] for holder in SIZES})
    has: dict[Holder, set[Path]] = {holder: set() for holder in SIZES}
    events: list[Event] = []
    now = 0.0
    for seconds, holder, path, step in steps:
        now += seconds
        keys = keys_of(path, SIZES[holder])
        depth = sum(prefix in has[holder] for prefix in prefixes(path))
        if step == "store":
            index.store(holder, keys[depth - 1] if depth else None, keys[depth:], now)
            has[holder].update(prefixes(path))
            events.append((now, holder, path, (len(path) - depth) * SIZES[holder]))
        elif step == "predict":
            index.predict(holder, keys, now)
            events.append((now, holder, path[:depth], depth * SIZES[holder]))
        elif step == "evict":
            if depth == len(path):
                index.evict(holder, keys[-1:])
                lost = {b for b in has[holder] if b[: len(path)] == path}
                has[holder] -= lost
                events = [
                    (t, h, p[: len(path) - 1] if h == holder and p[: len(path)] == path else p, n)
                    for t, h, p, n in events
                ]
                # what is below an evicted block is an orphan: the replica evicts it too
                size = SIZES[holder]
                index.evict(holder, [keys_of(b, size)[-1] for b in lost - {path}])
        else:
            index.remove(holder)
            index.add(holder, block_size=SIZES[holder])
            has[holder].clear()
            events = [event for event in events if event[1] != holder]
    for above, branch in walk(index.hottest(1000, now)):
        block, size = first_block(branch)
        least = rates(events, block, size, now)
        for holder, rate in branch.rates.items():
            assert rate >= least.get(holder, 0.0) * (1 - 1e-9)
            assert above is None or above.rates[holder] >= rate * (1 - 1e-9)
            if above is None:
                assert rate == pytest.approx(least[holder])
        assert set(least) <= set(branch.rates)


A = Holder("fine", 0)


def test_both_parts_of_a_run_that_is_split_go_on_from_its_heat() -> None:
    index = Index()
    index.add(A)
    index.store(A, None, keys_of((0, 0, 0), 16), 0.0)
    index.store(A, None, keys_of((0, 1), 16), 0.0)
    index.predict(A, keys_of((0, 1), 16), 0.0)
    (trunk,) = index.hottest(3, 0.0)
    assert trunk.rate * HEAT_S == pytest.approx(48 + 16 + 32)
    assert [branch.rate * HEAT_S for branch in trunk.children] == pytest.approx([48, 16 + 32])


def rate_after(tokens: int, seconds: float, quiet: float = 0.0) -> float:
    """Of a branch of `tokens` that is served every tenth of a second, then not at all."""
    index = Index()
    index.add(A)
    keys = keys_of((0,) * (tokens // 16), 16)
    index.replace(A, [(None, keys)], 0.0)
    for step in range(int(10 * seconds)):
        index.predict(A, keys, step / 10)
    (branch,) = index.hottest(1, seconds + quiet)
    return branch.rate


def test_a_steady_flow_settles_at_its_rate() -> None:
    for tokens in (16, 160):
        assert rate_after(tokens, 5 * HEAT_S) == pytest.approx(10 * tokens, rel=0.01)
        assert rate_after(tokens, HEAT_S) < 7 * tokens


def test_a_branch_that_nobody_asks_for_cools() -> None:
    assert rate_after(160, 300.0, quiet=3 * HEAT_S) == pytest.approx(1600 * exp(-3), rel=0.02)
    assert rate_after(160, 300.0, quiet=100 * HEAT_S) < 1e-9


def test_new_blocks_are_heat_when_they_are_reported_and_a_snapshot_is_none() -> None:
    index = Index()
    index.add(A)
    keys = keys_of((0, 1, 0), 16)
    index.replace(A, [(None, keys[:1])], 0.0)
    assert index.hottest(10, 0.0) == []
    index.predict(A, keys, 1.0)  # one block is there, two are computed
    index.store(A, keys[0], keys[1:], 1.0)
    (branch,) = index.hottest(10, 1.0)
    assert (branch.start, branch.end) == (0, 48)
    assert branch.rates == {A: pytest.approx(48 / HEAT_S)}
