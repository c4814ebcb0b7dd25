"""The index under churn: memory stays flat, and routers that heard the same know the same."""

import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import pytest

from hotbranch.keys import TOKEN_BYTES, block_keys, root
from hotbranch.v1.cache_pb2 import CacheUpdate, Run, Snapshot
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.index.index import Index
from router.index.view import View

SEED = root("m")
BLOCK = 1  # tokens
LIFE_S = 7.5
STEP_S = 0.1
TRUNK, TAIL = 300, 300  # blocks at most
ROUNDS = 10
Change = Callable[[Index], None]


@dataclass(frozen=True)
class Prompt:
    """A tail of its own below the first `depth` blocks of a trunk that others share."""

    trunk: list[int]
    depth: int
    tail: list[int]

    @property
    def keys(self) -> list[int]:
        return self.trunk[: self.depth] + self.tail


class Prompts:
    """Endless prompts below some forty trunks, which come and go."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.trunks = [self.fresh(SEED, TRUNK) for _ in range(40)]

    def fresh(self, parent: int, blocks: int) -> list[int]:
        return block_keys(self.rng.randbytes(blocks * BLOCK * TOKEN_BYTES), BLOCK, parent)

    def draw(self) -> Prompt:
        at = int(len(self.trunks) * self.rng.random() ** 2)  # some are hotter than others
        if self.rng.random() < 0.02:
            self.trunks[at] = self.fresh(SEED, TRUNK)
        trunk, depth = self.trunks[at], self.rng.randint(1, TRUNK)
        return Prompt(trunk, depth, self.fresh(trunk[depth - 1], self.rng.randint(1, TAIL)))


class Cache:
    """A replica's prefix cache: the oldest prompt is evicted, from its end up to where it forks.

    What happens to it is told as changes, for any number of indexes.
    """

    def __init__(self, holder: Holder, capacity: int) -> None:
        self.holder = holder
        self.capacity = capacity
        self.size = 0  # blocks
        self.prompts: deque[Prompt] = deque()
        self.depths: dict[int, list[int]] = {}  # first key of a trunk -> how deep its prompts go

    def run(self, prompt: Prompt, now: float = 0.0) -> Iterator[Change]:
        """A prompt is served: its new blocks are stored, then others go until all fit."""
        known = min(self.deepest(prompt), prompt.depth)
        keys = prompt.keys
        self.add(prompt)
        parent = keys[known - 1] if known else None
        yield lambda index: index.store(self.holder, parent, keys[known:], now)
        while self.size > self.capacity:
            gone = self.drop()
            yield partial(Index.evict, holder=self.holder, keys=gone)

    def wipe(self, now: float = 0.0) -> Iterator[Change]:
        """The replica starts anew with the newer half of its prompts."""
        for _ in range(len(self.prompts) // 2):
            self.drop()
        runs = self.runs()
        yield lambda index: index.clear(self.holder)
        yield lambda index: index.replace(self.holder, runs, now)

    def runs(self) -> list[tuple[int | None, list[int]]]:
        """What a snapshot says: every block once, parents first."""
        told: set[int] = set()
        runs: list[tuple[int | None, list[int]]] = []
        for prompt in self.prompts:
            keys = prompt.keys
            known = next((i for i, key in enumerate(keys) if key not in told), len(keys))
            runs.append((keys[known - 1] if known else None, keys[known:]))
            told.update(keys)
        return runs

    def deepest(self, prompt: Prompt) -> int:
        return max(self.depths.get(prompt.trunk[0], ()), default=0)

    def add(self, prompt: Prompt) -> None:
        self.size += len(prompt.tail) + max(0, prompt.depth - self.deepest(prompt))
        self.prompts.append(prompt)
        self.depths.setdefault(prompt.trunk[0], []).append(prompt.depth)

    def drop(self) -> list[int]:
        """Evict the oldest prompt; its blocks that no other one needs, children first."""
        oldest = self.prompts.popleft()
        depths = self.depths[oldest.trunk[0]]
        depths.remove(oldest.depth)
        if not depths:
            del self.depths[oldest.trunk[0]]
        gone = oldest.tail[::-1] + oldest.trunk[self.deepest(oldest) : oldest.depth][::-1]
        self.size -= len(gone)
        return gone

    def keys(self) -> frozenset[int]:
        return frozenset().union(*(prompt.keys for prompt in self.prompts))


def check(index: Index, caches: Sequence[Cache]) -> None:
    """The index holds what the caches hold, and not a block more."""
    held = [cache.keys() for cache in caches]
    for cache, keys in zip(caches, held, strict=True):
        assert index.held(cache.holder) == keys
        assert index.held_count(cache.holder) == len(keys) == cache.size
    assert index.blocks == len(frozenset().union(*held))


def fleet(capacity: int) -> list[Cache]:
    return [Cache(Holder(f"r{i}"), capacity) for i in range(4)]


def knowing(caches: Sequence[Cache], limit: float = inf) -> Index:
    """An index that has their names."""
    index = Index(limit, prediction_s=LIFE_S)
    for cache in caches:
        index.add(cache.holder, block_size=BLOCK)
    return index


@pytest.mark.parametrize(("limit", "prompts_a_round"), [(inf, 200), (12_000, 400)])
def test_field_report_24_memory_is_flat_under_churn(limit: float, prompts_a_round: int) -> None:
    """At full speed; replicas start anew, or others with other names take their place."""
    prompts, rng = Prompts(24), random.Random(24)
    # Some 15,000 blocks reported and as many predicted: the same size of dictionary all along.
    caches = fleet(capacity=4800)
    index = knowing(caches, limit)
    silent = Holder("silent")
    index.add(silent, block_size=BLOCK, capacity=2000)
    changed = 0  # blocks
    peaks = [0] * ROUNDS  # bytes, by round
    gc.freeze()  # what other modules left is no part of this
    tracemalloc.start()
    try:
        for count in range(1, ROUNDS * prompts_a_round + 1):
            now = count * STEP_S
            at = rng.randrange(len(caches))
            cache = caches[at]
            if count % 211 == 0:
                index.remove(cache.holder)
                cache = caches[at] = Cache(Holder(f"r{count}"), cache.capacity)
                index.add(cache.holder, block_size=BLOCK)
            elif count % 97 == 0:
                for change in cache.wipe(now):
                    change(index)
            prompt = prompts.draw()
            keys = prompt.keys
            index.expire(now)
            for _ in range(rng.choice((1, 1, 4))):
                index.predict(cache.holder, keys, now)
            changed += 2 * len(keys)
            assert index.predicted_blocks <= LIFE_S / STEP_S * (TRUNK + TAIL)
            if rng.random() < 0.1:  # it never runs
                index.withdraw(cache.holder, keys)
                continue
            for change in cache.run(prompt, now):
                change(index)
            changed += 2 * len(prompt.tail)
            if count % 3 == 0:
                index.predict(silent, keys, now)
            if limit == inf:
                assert index.match(keys).depth(cache.holder) == len(keys)
            assert index.blocks <= min(limit, 2000 + sum(cache.size for cache in caches))
            index.store(cache.holder, keys[-2], keys[-1:], now)  # computed once more
            index.evict(cache.holder, keys[-1:])
            if count % 50 == 0:
                gc.collect()
                at = (count - 1) // prompts_a_round
                peaks[at] = max(peaks[at], tracemalloc.get_traced_memory()[0])
        index.remove(silent)
        if limit == inf:
            check(index, caches)
        else:
            assert index.forgotten > 50 * ROUNDS * prompts_a_round
        assert changed > 600 * ROUNDS * prompts_a_round
        warm, last = max(peaks[4:7]), max(peaks[7:])
        assert last < 1.05 * warm, peaks
        for cache in caches:
            index.remove(cache.holder)
        assert (index.blocks, index.predicted_blocks) == (0, 0)
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def depths(index: Index, caches: Sequence[Cache], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Of each prompt, what each holder has."""
    matches = [index.match(prompt.keys) for prompt in prompts]
    return [[match.depth(cache.holder) for cache in caches] for match in matches]


def restored(caches: Sequence[Cache]) -> Index:
    """An index of a router that starts now: it knows nothing but snapshots."""
    index = Index()
    for cache in caches:
        runs = [Run(parent=parent, keys=keys) for parent, keys in cache.runs()]
        snapshot = Snapshot(runs=runs, last=True)
        view = View(index, cache.holder.replica, Counter())
        view.connected(Description(block_size=BLOCK, ranks=1), comparable=True)
        view.restart()
        view.apply(CacheUpdate(epoch=1, snapshot=snapshot), now=0.0)
    return index


def test_field_report_15_a_router_that_starts_anew_matches_as_the_one_before() -> None:
    """All but the few requests that were under way, which only the one before could predict."""
    for seed in range(5):
        prompts, rng = Prompts(seed), random.Random(seed)
        caches = fleet(capacity=20_000)
        index = knowing(caches)
        seen: list[Prompt] = []
        for count in range(600):
            prompt, cache = prompts.draw(), rng.choice(caches)
            index.predict(cache.holder, prompt.keys, count * STEP_S)
            index.expire(count * STEP_S)
            if count < 596:  # the others are under way
                for change in cache.run(prompt, count * STEP_S):
                    change(index)
            seen.append(prompt)
        seen = seen[300:] + [prompts.draw() for _ in range(300)]
        again = restored(caches)
        check(again, caches)
        before, after = depths(index, caches, seen), depths(again, caches, seen)
        assert before != after
        same = sum(old == new for old, new in zip(before, after, strict=True))
        assert same >= 0.95 * len(seen)
        index.expire(1000.0)
        assert depths(index, caches, seen) == after


def test_field_report_16_routers_that_heard_the_same_are_equal() -> None:
    """Each hears every replica in order, but the replicas interleaved as chance has it."""
    for seed in range(5):
        prompts, rng = Prompts(seed), random.Random(seed)
        caches = fleet(capacity=2000)
        told: dict[Holder, list[Change]] = {cache.holder: [] for cache in caches}
        for count in range(120):
            cache = rng.choice(caches)
            if count % 37 == 36:
                told[cache.holder] += cache.wipe()
            told[cache.holder] += cache.run(prompts.draw())
        turns = [holder for holder, changes in told.items() for _ in changes]
        indexes = [knowing(caches) for _ in range(8)]
        for index in indexes:
            rng.shuffle(turns)
            streams = {holder: iter(changes) for holder, changes in told.items()}
            for holder in turns:
                next(streams[holder])(index)
            check(index, caches)
        some = [prompts.draw() for _ in range(40)]
        some += [prompt for cache in caches for prompt in cache.prompts]
        first = depths(indexes[0], caches, some)
        assert any(max(row) for row in first)
        assert all(depths(index, caches, some) == first for index in indexes[1:])


@pytest.mark.slow
def test_resident_memory_is_flat_over_ten_minutes_of_churn() -> None:
    """Of a process that does nothing else, at full speed, which takes far less than ten minutes."""
    script = Path(__file__).with_name("index_soak.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    output = subprocess.check_output([sys.executable, script, "600"], env=environment, text=True)
    found = json.loads(output)
    assert found["stored"] > 600 * 8000
    assert found["warm"] > 60 << 20  # the index is most of it
    assert found["largest"] < 1.05 * found["warm"], found
    assert abs(found["last"] - found["warm"]) < 0.05 * found["warm"], found
