"""One replica's cache as its WatchCache stream tells it: snapshot, then deltas without a gap."""

from collections import Counter
from collections.abc import Sequence

from hotbranch.v1.cache_pb2 import TIER_GPU, CacheDelta, CacheUpdate, Snapshot
from router.fleet.watcher import ViewLost
from router.index.index import Index


class View:
    """Applies updates to the index under one holder's name.

    Blocks of an older epoch are dropped as soon as a newer one is seen. A view that was lost keeps
    its blocks, as the best guess, until the next snapshot is complete; a replica that is gone holds
    nothing.
    """

    def __init__(self, index: Index, holder: str) -> None:
        self._index = index
        self._holder = holder
        self._epoch: int | None = None
        self._sequence: int | None = None  # None: no complete snapshot on this stream
        self._pending: list[tuple[int, Sequence[int]]] = []
        self.resyncs: Counter[str] = Counter()
        index.add(holder)

    @property
    def current(self) -> bool:
        """Whether the index equals the replica, up to what is under way."""
        return self._sequence is not None

    def restart(self) -> None:
        """A new stream begins: a snapshot must come first."""
        self._sequence = None
        self._pending = []

    def apply(self, update: CacheUpdate) -> None:
        """Take one message of the stream. Raises ViewLost."""
        if update.epoch != self._epoch:
            if self._epoch is not None:  # the first one leaves what was predicted before it
                self._index.clear(self._holder)
            self._epoch = update.epoch
            self.restart()
        kind = update.WhichOneof("update")
        if kind == "snapshot":
            self._snapshot(update.snapshot)
        elif kind == "delta":
            self._delta(update.delta)

    def _snapshot(self, snapshot: Snapshot) -> None:
        self._sequence = None
        for run in snapshot.runs:
            if run.tier == TIER_GPU:
                self._pending.append((run.parent, list(run.keys)))
        if snapshot.last:
            self._index.replace(self._holder, self._pending)
            self._pending = []
            self._sequence = snapshot.sequence

    def _delta(self, delta: CacheDelta) -> None:
        if self._sequence is None:
            raise ViewLost("no_snapshot")
        if delta.sequence != self._sequence + 1:
            self._sequence = None
            raise ViewLost("gap")
        self._sequence = delta.sequence
        if delta.cleared:
            self._index.clear(self._holder)
        for run in delta.stored:
            if run.tier == TIER_GPU:
                self._index.store(self._holder, run.parent, list(run.keys))
        for gone in delta.evicted:
            if gone.tier == TIER_GPU:
                self._index.evict(self._holder, list(gone.keys))

    def lost(self, reason: str) -> None:
        """Count a view that has to be taken anew."""
        self.resyncs[reason] += 1

    def forget(self) -> None:
        """The replica is out of reach; what it holds when it comes back, its snapshot tells."""
        self._index.clear(self._holder)
        self._epoch = None
        self.restart()

    def close(self) -> None:
        """The replica is gone for good."""
        self._index.remove(self._holder)
