"""A replica that never reports: what was sent to it stands for what it holds."""

import random
from bisect import bisect
from collections import Counter
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.index.index import Index

SILENT, OTHER = Holder("silent"), Holder("other")
SEED = root("m")
CAPACITY = 7
REQUESTS = 1200
Path = tuple[int, ...]
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path) -> list[int]:
    return block_keys(b"".join(token.to_bytes(4, "little") for token in path), 1, SEED)


def prefixes(path: Path) -> list[Path]:
    return [path[: end + 1] for end in range(len(path))]


class Lru:
    """A prefix cache: blocks with their last use; evicts the least recently used leaf."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[Path, int] = {}
        self.uses = 0

    def matched(self, path: Path) -> int:
        return sum(prefix in self.used for prefix in prefixes(path))

    def run(self, path: Path) -> None:
        self.uses += 1
        self.used.update(dict.fromkeys(prefixes(path), self.uses))
        while len(self.used) > self.capacity:
            inner = {block[:-1] for block in self.used}
            leaves = (block for block in self.used if block not in inner)
            del self.used[min(leaves, key=self.used.__getitem__)]

    def lose(self, path: Path) -> None:
        """A block, and all below it."""
        for block in [block for block in self.used if block[: len(path)] == path]:
            del self.used[block]


class HistoryMachine(RuleBasedStateMachine):
    """Equal block by block. Blocks of equal last use are of one path, so no tie is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.now = 0.0
        self.index.add(OTHER, capacity=CAPACITY)
        self.index.add(SILENT, capacity=CAPACITY)
        self.cache = Lru(CAPACITY)

    @rule(path=paths)
    def send(self, path: Path) -> None:
        self.now += 1
        self.index.predict(SILENT, keys_of(path), self.now)
        self.cache.run(path)

    @rule(path=paths)
    def send_to_the_other(self, path: Path) -> None:
        self.now += 1
        self.index.predict(OTHER, keys_of(path), self.now)

    @rule(path=paths, have=st.integers(0, 4))
    def missed(self, path: Path, have: int) -> None:
        have = min(have, len(path) - 1)
        self.now += 1
        self.index.missed(SILENT, keys_of(path), have, self.now)
        self.cache.lose(path[: have + 1])
        self.cache.run(path)

    @rule()
    def clear(self) -> None:
        self.index.clear(SILENT)
        self.cache = Lru(CAPACITY)

    @rule(path=paths)
    def match(self, path: Path) -> None:
        self.index.expire(self.now + 1000)
        assert self.index.match(keys_of(path)).depth(SILENT) == self.cache.matched(path)

    @invariant()
    def holds_what_the_cache_holds(self) -> None:
        keys = {keys_of(block)[-1] for block in self.cache.used}
        assert self.index.held(SILENT) == keys
        assert self.index.held_count(SILENT) == len(keys)


HistoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistory = HistoryMachine.TestCase


@given(
    sent=st.lists(paths, max_size=8),
    ran=st.lists(st.integers(0, 7), max_size=3),
    back=st.lists(st.integers(0, 7)),
)
def test_a_prompt_that_never_ran_leaves_what_others_need(
    sent: list[Path], ran: list[int], back: list[int]
) -> None:
    """What others were sent for stays, and for good what one of them has run for."""
    index = Index()
    index.add(SILENT, capacity=1000)
    for path in sent:
        index.predict(SILENT, keys_of(path), 0.0)
    counts, held = Counter(sent), {sent[at] for at in ran if at < len(sent)}
    for path in held:
        index.computed(SILENT, keys_of(path), 0, 0.0)
    for path in (sent[at] for at in back if at < len(sent)):
        index.withdraw(SILENT, keys_of(path))
        counts[path] = max(0, counts[path] - 1)
    left = {block for path in sent if path in held or counts[path] for block in prefixes(path)}
    assert index.held(SILENT) == {keys_of(block)[-1] for block in left}


def test_the_first_report_ends_it() -> None:
    index = Index()
    index.add(SILENT, capacity=CAPACITY)
    index.predict(SILENT, keys_of((0, 1)), 0.0)
    index.replace(SILENT, [(None, keys_of((1, 1)))], 1.0)
    assert index.held(SILENT) == set(keys_of((1, 1)))
    index.predict(SILENT, keys_of((0, 0)), 2.0)
    index.missed(SILENT, keys_of((0, 0)), 1, 2.0)
    index.clear(SILENT)
    index.predict(SILENT, keys_of((0, 0)), 3.0)
    assert index.held(SILENT) == frozenset()


def test_without_a_known_capacity_nothing_stands_in() -> None:
    index = Index()
    index.add(SILENT)
    index.store(SILENT, None, keys_of((0, 1)), 0.0)
    index.predict(SILENT, keys_of((0, 0)), 0.0)
    index.expire(1000.0)
    assert index.held(SILENT) == set(keys_of((0, 1)))


def hit_rate(informed_by: str) -> float:
    """The share of blocks that were there already, over requests to four caches.

    The prompts are tails of their own below Zipf-distributed heads, of which the caches hold a
    third. Each goes where most of it is known to be, in turn where that is equal; but every tenth
    one comes by another way, of which the history knows nothing.
    """
    rng = random.Random(7)
    weights = list(accumulate(1 / rank for rank in range(1, 241)))
    caches = {Holder(f"r{i}"): Lru(80) for i in range(4)}
    sent = dict.fromkeys(caches, 0)
    index = Index()
    for holder in caches:
        index.add(holder, capacity=80)
    hits = 0
    for now in range(REQUESTS):
        path = (*[bisect(weights, rng.random() * weights[-1])] * 4, 1000 + now)
        keys = keys_of(path)
        match = index.match(keys)
        believed = {holder: match.depth(holder) for holder in caches}
        actual = {holder: cache.matched(path) for holder, cache in caches.items()}
        known = {"history": believed, "truth": actual, "nothing": {}}[informed_by]
        holder = max(caches, key=lambda holder: (known.get(holder, 0), -sent[holder]))
        strays = now % 10 == 9
        holder = rng.choice(list(caches)) if strays else holder
        hits += actual[holder]
        caches[holder].run(path)
        sent[holder] += 1
        if not strays:
            index.predict(holder, keys, float(now))
            if actual[holder] < believed[holder]:
                index.missed(holder, keys, actual[holder], float(now))
        index.expire(float(now))
    return hits / (4 * REQUESTS)


def test_routing_by_history_is_nearly_as_good_as_by_the_truth() -> None:
    history, truth, nothing = map(hit_rate, ("history", "truth", "nothing"))
    assert truth > 1.4 * nothing
    assert history > 0.9 * truth, (history, truth, nothing)
