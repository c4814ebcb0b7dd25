"""A replica that does what a random script says, and tells of it by the rules of cache.proto."""

import random
from collections import Counter
from collections.abc import Callable, Iterable

from hotbranch.keys import block_keys, root
from hotbranch.v1.cache_pb2 import (
    GROUP_STATE,
    GROUP_WINDOW,
    TIER_CPU,
    TIER_DISK,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Run,
    Snapshot,
)
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder

SPACES = 2
LONGEST = 7  # blocks of one token, of which there are two
Path = tuple[int, ...]  # a namespace, then the tokens of its blocks
Held = list[frozenset[int]]  # keys, by rank


def _names() -> dict[Path, int]:
    names: dict[Path, int] = {(space,): root("m", salt=str(space)) for space in range(SPACES)}
    paths = list(names)
    for path in paths:
        for token in range(2) if len(path) <= LONGEST else ():
            longer = (*path, token)
            names[longer] = block_keys(token.to_bytes(4, "little"), 1, names[path])[0]
            paths.append(longer)
    return {path: key for path, key in names.items() if len(path) > 1}


KEYS = _names()
LEAVES = [path for path in KEYS if len(path) == LONGEST + 1]


def prefixes(path: Path) -> list[Path]:
    """The blocks of a path, from the root on."""
    return [path[:end] for end in range(2, len(path) + 1)]


def keys(path: Path) -> list[int]:
    return [KEYS[prefix] for prefix in prefixes(path)]


def closed(blocks: Iterable[Path]) -> set[Path]:
    """Those of the blocks that are there with all before them."""
    found: set[Path] = set()
    for path in sorted(blocks):
        if len(path) == 2 or path[:-1] in found:
            found.add(path)
    return found


class Replica:
    """Holds a bag of blocks for each rank. `history` is what it held at each of its numbers."""

    def __init__(self, rng: random.Random, address: str, ranks: int) -> None:
        self.address = address
        self.holders = [Holder(address, rank) for rank in range(ranks)]
        self.description = Description(block_size=1, capacity_blocks=40, ranks=ranks)
        self.history: dict[tuple[int, int], Held] = {}
        self.sequence = 0
        self.epoch = 0
        self.tell: list[Callable[[CacheUpdate], None]] = []
        self._rng = rng
        self._held: list[Counter[Path]] = [Counter() for _ in range(ranks)]
        self.begin()

    @property
    def ranks(self) -> range:
        return range(len(self._held))

    def begin(self) -> None:
        """A new epoch with what is left of the cache. Its numbers start anywhere."""
        self.epoch = self._rng.getrandbits(64)
        self.sequence = self._rng.choice((0, self.sequence, self._rng.randint(0, self.sequence)))
        for held in self._held:
            for path in self._rng.sample(sorted(held), self._rng.randint(0, len(held))):
                del held[path]
        self._note()

    def held(self) -> Held:
        return [frozenset(KEYS[path] for path in held) for held in self._held]

    def matchable(self, rank: int) -> set[Path]:
        """The blocks that a rank has with all before them."""
        return closed(self._held[rank])

    def step(self) -> None:
        """Something changes: all is cleared, runs are stored, blocks are evicted; or nothing."""
        delta = CacheDelta(sequence=self.sequence + 1, cleared=self._rng.random() < 0.03)
        if delta.cleared:
            for held in self._held:
                held.clear()
        for _ in range(self._rng.randint(0, 2)):
            self._store(delta, self._rng.choice(self.ranks))
        for _ in range(self._rng.randint(0, 2)):
            self._evict(delta, self._rng.choice(self.ranks))
        self._report(delta)

    def shed(self) -> None:
        """One copy goes of every block: what is still there had been stored more than once."""
        delta = CacheDelta(sequence=self.sequence + 1)
        for rank, held in enumerate(self._held):
            self._remove(delta, rank, sorted(held, reverse=True))
        self._report(delta)

    def snapshot(self) -> list[CacheUpdate]:
        """All that is held, in one message or several."""
        runs: list[Run] = []
        for rank, held in enumerate(self._held):
            before: Path | None = None
            for path in sorted(held.elements()):  # parents before children
                if path[:-1] != before:
                    runs.append(self._run(rank, path[:-1]))
                runs[-1].keys.append(KEYS[path])
                before = path
            runs.append(self._elsewhere(rank))
        size = self._rng.randint(1, len(runs))
        parts = [Snapshot(runs=runs[at : at + size]) for at in range(0, len(runs), size)]
        parts[-1].last = True
        parts[-1].sequence = self.sequence
        return [CacheUpdate(epoch=self.epoch, snapshot=part) for part in parts]

    def _report(self, delta: CacheDelta) -> None:
        if self._rng.random() < 0.2:
            run = self._elsewhere(self._rng.choice(self.ranks))
            delta.stored.append(run)
            gone = Evicted(keys=run.keys, rank=run.rank, tier=run.tier, group=run.group)
            if self._rng.random() < 0.5:
                delta.evicted.append(gone)
        self.sequence += 1
        self._note()
        for tell in self.tell:
            tell(CacheUpdate(epoch=self.epoch, delta=delta))

    def _store(self, delta: CacheDelta, rank: int) -> None:
        """A prompt was computed from the first block on that was not there.

        At times from an earlier one, which makes copies; or the start is lost while the rest is
        computed, which leaves orphans.
        """
        path = self._rng.choice(LEAVES)[: self._rng.randint(2, LONGEST + 1)]
        first = len(self.matchable(rank).intersection(prefixes(path)))
        if self._rng.random() < 0.25:
            first = self._rng.randrange(len(path) - 1)
        new = prefixes(path)[first:]
        split = self._rng.randint(0, len(new))  # at times two runs, parents first
        for part in (new[:split], new[split:]):
            if part:
                run = self._run(rank, part[0][:-1])
                run.keys.extend(KEYS[block] for block in part)
                delta.stored.append(run)
        self._held[rank].update(new)

    def _evict(self, delta: CacheDelta, rank: int) -> None:
        """A branch goes, children before parents; or a few blocks from anywhere, in any order."""
        copies = sorted(self._held[rank].elements())
        if len(copies) < 6:
            return
        gone = self._rng.sample(copies, self._rng.randint(1, 4))
        if self._rng.random() < 0.6:
            gone = [path for path in reversed(copies) if path[: len(gone[0])] == gone[0]]
        self._remove(delta, rank, gone)

    def _remove(self, delta: CacheDelta, rank: int, gone: list[Path]) -> None:
        self._held[rank] -= Counter(gone)
        delta.evicted.append(Evicted(keys=[KEYS[path] for path in gone], rank=rank))

    def _elsewhere(self, rank: int) -> Run:
        """Blocks on another tier, or of other layers, which are no business of the view."""
        path = self._rng.choice(LEAVES)
        run = self._run(rank, path[:1])
        run.keys.extend(keys(path))
        if self._rng.random() < 0.5:
            run.tier = self._rng.choice((TIER_CPU, TIER_DISK))
        else:
            run.group = self._rng.choice((GROUP_WINDOW, GROUP_STATE))
        return run

    def _run(self, rank: int, parent: Path) -> Run:
        """A run below a parent; it has none at a namespace's root."""
        return Run(rank=rank, parent=KEYS[parent]) if len(parent) > 1 else Run(rank=rank)

    def _note(self) -> None:
        self.history[self.epoch, self.sequence] = self.held()
