"""What an upstream's ranks hold: as their KV events tell, or as what was sent to them does."""

import time
from collections import Counter
from collections.abc import Sequence

from hotbranch.kv_events.translate import Changes, StoredRun
from hotbranch.upstream import Upstream as Settings
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.index.index import Index
from router.index.tiers import Tiers
from router.upstream.events import Events


class Caches:
    """Implements `router.upstream.events.Told` over the index, in the name of the upstream's URL.

    A rank without events, or whose events have no beginning yet, goes by its history. `totals`
    counts the recoveries of all upstreams together.
    """

    def __init__(self, index: Index, settings: Settings, totals: Counter[str]) -> None:
        self.recoveries: Counter[str] = Counter()
        self._settings = settings
        self._totals = totals
        holders = [Holder(settings.url, rank) for rank in range(settings.ranks)]
        self._ranks = {holder: Tiers(index, holder) for holder in holders}
        self._events: list[Events] = []  # by rank; none where nobody tells
        self._facts: Description | None = None  # of the server, while it is reached
        self._known = False

    @property
    def heard_at(self) -> float:
        return max((events.heard_at for events in self._events), default=0.0)

    @property
    def blocks(self) -> int:
        """Blocks that they hold, where events tell."""
        return sum(events.blocks for events in self._events)

    @property
    def problem(self) -> str:
        """What is wrong with the events, or nothing."""
        return next((events.problem for events in self._events if events.problem), "")

    def connected(self, facts: Description, comparable: bool, same: bool) -> None:
        """The server is reached. Without `comparable` keys its events say nothing. `same`: it is
        surely the process that it was, so that what events told still holds."""
        if self._known:
            self._count("reconnect")
        self._known, self._facts = True, facts
        for rank in self._ranks.values():
            rank.add(facts.block_size, facts.capacity_blocks)
        wanted = (facts.model, facts.block_size) if comparable else None
        if any(events.of != wanted for events in self._events):
            self._close_events()
        if comparable and self._settings.kv_events and not self._events:
            self._events = [self._listen(holder, facts) for holder in self._ranks]
        for events in self._events:
            events.back(same)

    def forget(self) -> None:
        """The server is out of reach: what it holds is not known."""
        self._facts = None
        for events in self._events:
            events.away()
        for rank in self._ranks.values():
            rank.remove()

    def close(self) -> None:
        """It is gone for good."""
        self._close_events()
        self.forget()

    def exact(self, holder: Holder, runs: Sequence[StoredRun]) -> None:
        if self._facts is not None:
            tiered = [(run.tier, run.parent, run.keys) for run in runs]
            self._ranks[holder].replace(tiered, time.monotonic())

    def change(self, holder: Holder, changes: Changes) -> None:
        if self._facts is None:
            return
        rank = self._ranks[holder]
        if changes.cleared:
            rank.clear()
        for run in changes.stored:
            rank.store(run.tier, run.parent, run.keys, time.monotonic())
        for gone in changes.evicted:
            rank.evict(gone.tier, gone.keys)

    def lost(self, holder: Holder, kind: str) -> None:
        self._count(kind)
        if (facts := self._facts) is not None:
            self._ranks[holder].add(facts.block_size, facts.capacity_blocks)

    def _listen(self, holder: Holder, facts: Description) -> Events:
        settings = self._settings
        assert settings.kv_events is not None
        endpoint = _of_rank(settings.kv_events, holder.rank)
        replay = _of_rank(settings.replay, holder.rank) if settings.replay else None
        model, size = facts.model, facts.block_size
        return Events(holder, endpoint, replay, settings.topic, model, size, self)

    def _close_events(self) -> None:
        for events in self._events:
            events.close()
        self._events = []

    def _count(self, kind: str) -> None:
        self.recoveries[kind] += 1
        self._totals[kind] += 1


def _of_rank(endpoint: str, rank: int) -> str:
    """Ranks publish on ports one after the other."""
    if not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
