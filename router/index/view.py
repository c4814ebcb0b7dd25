"""One replica's cache as its WatchCache stream tells it: snapshot, then deltas without a gap."""

from collections import Counter

from hotbranch.v1.cache_pb2 import (
    GROUP_ATTENTION,
    TIER_CPU,
    TIER_DISK,
    TIER_GPU,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Run,
    Snapshot,
)
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.fleet.watcher import ViewLost
from router.index.index import Index
from router.index.tiers import TieredRun, Tiers
from router.index.tree import Inconsistent

RECOVERIES = (
    "gap",  # a number is missing
    "late",  # what an upstream published before could not be had
    "regression",  # a number came again, or a smaller one
    "overtaken",  # a delta came before the snapshot was complete
    "inconsistent",  # one key in two places
    "rank",  # a rank that the replica did not describe
    "ended",  # the stream ended
    "overflow",  # the replica ended it: this router read too slowly
    "epoch",  # the replica began anew
    "reconnect",
    "gone",  # for good
)


class View:
    """Applies updates to the index, in the name of the address they come from.

    Blocks of an older epoch are dropped as soon as a newer one is seen. A view that was lost keeps
    its blocks, as the best guess, until the next snapshot is complete; a replica that is gone holds
    nothing. `totals` counts the recoveries of all views together.
    """

    def __init__(self, index: Index, address: str, totals: Counter[str]) -> None:
        self.recoveries: Counter[str] = Counter()
        self.heard_at = 0.0
        self._index = index
        self._address = address
        self._totals = totals
        self._ranks: list[Tiers] = []
        self._comparable = True
        self._known_epoch: int | None = None  # the last one seen, on any connection
        self._epoch: int | None = None
        self._sequence: int | None = None  # None: no complete snapshot on this stream
        self._pending: list[list[TieredRun]] = []  # by rank

    @property
    def current(self) -> bool:
        """Whether the index equals the replica, up to what is under way."""
        return self._sequence is not None

    def connected(self, description: Description, comparable: bool) -> None:
        """The replica is reached; until its first snapshot its history stands for its cache."""
        if self._ranks:
            self._count("reconnect")
        self._remove()
        holders = [Holder(self._address, rank) for rank in range(description.ranks or 1)]
        self._ranks = [Tiers(self._index, holder) for holder in holders]
        for rank in self._ranks:
            rank.add(description.block_size, description.capacity_blocks)
        self._comparable = comparable

    def restart(self) -> None:
        """A new stream begins: a snapshot must come first."""
        self._sequence = None
        self._pending = [[] for _ in self._ranks]

    def apply(self, update: CacheUpdate, now: float) -> None:
        """Take one message of the stream. Raises ViewLost."""
        self.heard_at = now
        if update.epoch != self._known_epoch:
            if self._known_epoch is not None:
                self._count("epoch")
            self._known_epoch = update.epoch
        if update.epoch != self._epoch:
            if self._epoch is not None:  # the first one leaves what was predicted before it
                self._clear()
            self._epoch = update.epoch
            self.restart()
        if not self._comparable:
            return
        try:
            if update.HasField("snapshot"):
                self._snapshot(update.snapshot, now)
            elif update.HasField("delta"):
                self._delta(update.delta, now)
        except Inconsistent:
            self._clear()
            self.restart()
            raise ViewLost("inconsistent") from None

    def _snapshot(self, snapshot: Snapshot, now: float) -> None:
        self._sequence = None
        for run in snapshot.runs:
            if _counts(run):
                self._pending[self._rank(run)].append((run.tier, _parent(run), list(run.keys)))
        if snapshot.last:
            for rank, runs in zip(self._ranks, self._pending, strict=True):
                rank.replace(runs, now)
            self.restart()
            self._sequence = snapshot.sequence

    def _delta(self, delta: CacheDelta, now: float) -> None:
        if self._sequence is None:
            # The snapshot names the state before this delta, so it cannot come after it.
            raise ViewLost("overtaken")
        expected = self._sequence + 1
        if delta.sequence != expected:
            self._sequence = None
            raise ViewLost("gap" if delta.sequence > expected else "regression")
        self._sequence = delta.sequence
        if delta.cleared:
            self._clear()
        for run in delta.stored:
            if _counts(run):
                rank = self._ranks[self._rank(run)]
                rank.store(run.tier, _parent(run), list(run.keys), now)
        for gone in delta.evicted:
            if _counts(gone):
                self._ranks[self._rank(gone)].evict(gone.tier, list(gone.keys))

    def lost(self, reason: str) -> None:
        """Count a view that has to be taken anew."""
        self._count(reason)

    def forget(self) -> None:
        """The replica is out of reach; what it holds when it comes back, its snapshot tells."""
        self._clear()
        self._epoch = None
        self.heard_at = 0.0
        self.restart()

    def close(self) -> None:
        """The replica is gone for good."""
        if self._ranks:
            self._count("gone")
        self._remove()

    def _remove(self) -> None:
        for rank in self._ranks:
            rank.remove()
        self._ranks = []

    def _clear(self) -> None:
        for rank in self._ranks:
            rank.clear()

    def _count(self, kind: str) -> None:
        self.recoveries[kind] += 1
        self._totals[kind] += 1

    def _rank(self, part: Run | Evicted) -> int:
        if part.rank >= len(self._ranks):
            self._sequence = None
            raise ViewLost("rank")
        return part.rank


def _counts(part: Run | Evicted) -> bool:
    """Whether it is about blocks that a prompt can reuse, as they lie or once they are loaded."""
    return part.group == GROUP_ATTENTION and part.tier in (TIER_GPU, TIER_CPU, TIER_DISK)


def _parent(run: Run) -> int | None:
    return run.parent if run.HasField("parent") else None
