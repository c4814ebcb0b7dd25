"""The index under churn: memory stays flat, and routers that heard the same know the same."""

import gc
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hotbranch.keys import TOKEN_BYTES, block_keys, root
from hotbranch.v1.cache_pb2 import CacheUpdate, Run, Snapshot
from router.index.index import Index
from router.index.view import View

SEED = root("m")
BLOCK = 1  # tokens
LIFE_S = 7.5
STEP_S = 0.1
TRUNK, TAIL = 300, 300  # blocks at most
ROUNDS, ROUND = 10, 300  # prompts
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

    def __init__(self, holder: str, capacity: int) -> None:
        self.holder = holder
        self.capacity = capacity
        self.size = 0  # blocks
        self.prompts: deque[Prompt] = deque()
        self.depths: dict[int, list[int]] = {}  # first key of a trunk -> how deep its prompts go

    def run(self, prompt: Prompt) -> Iterator[Change]:
        """A prompt is served: its new blocks are stored, then others go until all fit."""
        known = min(self.deepest(prompt), prompt.depth)
        keys = prompt.keys
        self.add(prompt)
        parent = keys[known - 1] if known else SEED
        yield lambda index: index.store(self.holder, parent, keys[known:])
        while self.size > self.capacity:
            gone = self.drop()
            yield lambda index, gone=gone: index.evict(self.holder, gone)

    def wipe(self) -> Iterator[Change]:
        """The replica starts anew with the newer half of its prompts."""
        for _ in range(len(self.prompts) // 2):
            self.drop()
        runs = [(SEED, prompt.keys) for prompt in self.prompts]
        yield lambda index: index.clear(self.holder)
        yield lambda index: index.replace(self.holder, runs)

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
    return [Cache(f"r{i}", capacity) for i in range(4)]


def knowing(caches: Sequence[Cache]) -> Index:
    """An index that has their names."""
    index = Index()
    for cache in caches:
        index.add(cache.holder)
    return index


def test_field_report_24_memory_is_flat_under_churn() -> None:
    """At full speed; replicas start anew, or others with other names take their place."""
    prompts, rng = Prompts(24), random.Random(24)
    # Some 15,000 blocks reported and as many predicted: the same size of dictionary all along.
    caches = fleet(capacity=4800)
    index = knowing(caches)
    changed = 0  # blocks
    peaks = [0] * ROUNDS  # bytes, by round
    gc.freeze()  # what other modules left is no part of this
    tracemalloc.start()
    try:
        for count in range(1, ROUNDS * ROUND + 1):
            now = count * STEP_S
            at = rng.randrange(len(caches))
            cache = caches[at]
            if count % 211 == 0:
                index.remove(cache.holder)
                cache = caches[at] = Cache(f"r{count}", cache.capacity)
                index.add(cache.holder)
            elif count % 97 == 0:
                for change in cache.wipe():
                    change(index)
            prompt = prompts.draw()
            keys = prompt.keys
            index.expire(now)
            for _ in range(rng.choice((1, 1, 4))):
                index.predict(cache.holder, SEED, keys, now + LIFE_S)
            changed += 2 * len(keys)
            assert index.predicted_blocks <= LIFE_S / STEP_S * (TRUNK + TAIL)
            if rng.random() < 0.1:  # it never runs
                index.withdraw(cache.holder, keys)
                continue
            for change in cache.run(prompt):
                change(index)
            changed += 2 * len(prompt.tail)
            assert index.match(keys).depth(cache.holder) == len(keys)
            assert index.blocks <= sum(cache.size for cache in caches)
            if count % 50 == 0:
                gc.collect()
                at = (count - 1) // ROUND
                peaks[at] = max(peaks[at], tracemalloc.get_traced_memory()[0])
        check(index, caches)
        assert changed > 2_000_000
        warm, last = max(peaks[4:7]), max(peaks[7:])
        assert last < 1.02 * warm, peaks
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
        runs = [Run(parent=SEED, keys=prompt.keys) for prompt in cache.prompts]
        snapshot = Snapshot(runs=runs, last=True)
        View(index, cache.holder).apply(CacheUpdate(epoch=1, snapshot=snapshot))
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
            index.predict(cache.holder, SEED, prompt.keys, count * STEP_S + LIFE_S)
            index.expire(count * STEP_S)
            if count < 596:  # the others are under way
                for change in cache.run(prompt):
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
        told: dict[str, list[Change]] = {cache.holder: [] for cache in caches}
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
