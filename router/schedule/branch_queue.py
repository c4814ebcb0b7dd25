"""The requests that wait for one server, depth first: what its cache makes cheapest goes first.

On a hot branch the least uncached work is the deepest match, so the server keeps receiving what
hangs below what it has until that is drained. A job is filed under the first block that the server
lacks: once a dispatch brings that block, all that wait for it move up, each once for a fork.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any, Literal

from router.schedule.job import Job
from router.schedule.shares import Shares

Order = Literal["depth_first", "arrival"]
SIZES = 32  # powers of two that a prompt can need


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting job. `matched` are the blocks that the server has, or will have by then."""

    job: Job
    matched: int
    uncached: int  # tokens
    waits: bool = True


class _Sizes:
    """Jobs by how much they need, in powers of two, summed up: read far more often than changed.

    `ahead` are the tokens of those that need less than a job of that size and half of those that
    need about as much, `behind` the number of the others.
    """

    def __init__(self) -> None:
        self.jobs, self.tokens = [0] * SIZES, [0] * SIZES
        self.ahead, self.behind = [0.0] * SIZES, [0.0] * SIZES
        self.total = 0

    def count(self, size: int, jobs: int, tokens: int) -> None:
        """Jobs of that size more, or less."""
        self.jobs[size] += jobs
        self.tokens[size] += tokens
        self.total += tokens
        ahead, behind = self.ahead, self.behind
        for other in range(size):
            behind[other] += jobs
        behind[size] += jobs / 2
        ahead[size] += tokens / 2
        for other in range(size + 1, SIZES):
            ahead[other] += tokens


class BranchQueue:
    """Of a server with blocks of `block_size` tokens. Pure.

    Matches are as of the last `file`; `tokens` sums what all need.
    """

    def __init__(self, block_size: int, shares: Shares, order: Order = "depth_first") -> None:
        self.tokens = 0
        self._block_size = block_size
        self._shares = shares
        self._order = order
        self._entries: dict[int, _Entry] = {}
        self._heaps: dict[str, list[Any]] = {}  # by tenant
        self._oldest: list[Any] = []
        self._below: dict[int, dict[int, _Entry]] = {}  # first block that is not there -> by job
        self._within, self._over = _Sizes(), _Sizes()  # of tenants within their share, and over it
        self._sizes: dict[str, tuple[_Sizes, bool]] = {}  # by tenant; whether it counts as over
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def file(self, job: Job, matched: int) -> None:
        """Add a job, or say how many of its blocks the server has now."""
        known = self._entries.get(job.id)
        if known:
            if known.matched == matched:
                return
            self._drop(known)
        else:
            self._shares.entered(job.tenant)
        entry = _Entry(job, matched, job.tokens - matched * self._block_size)
        self._entries[job.id] = entry
        self.tokens += entry.uncached
        if job.tenant not in self._sizes:
            self._sizes[job.tenant] = _Sizes(), self._shares.over(job.tenant)
        self._count(entry, 1)
        if (key := self._missing(entry)) is not None:
            self._below.setdefault(key, {})[job.id] = entry
        age, waiting = (job.arrived, next(self._serial), entry), len(self._entries)
        _push(self._oldest, age, waiting)
        _push(self._heaps.setdefault(job.tenant, []), (*self._rank(entry), *age), waiting)

    def remove(self, job: Job) -> None:
        """A job goes, to the server or away. KeyError when it does not wait here."""
        self._drop(self._entries.pop(job.id))
        self._shares.left(job.tenant)

    def next(self, overdue_since: float) -> tuple[Job, int] | None:
        """Whose turn it is, and its match: the oldest that arrived before `overdue_since`, else by
        priority the least that a tenant whose turn it may be has to compute."""
        oldest = _head(self._oldest)
        if oldest is None:
            self._heaps.clear()
            self._sizes.clear()
            return None
        if oldest.job.arrived < overdue_since:
            return oldest.job, oldest.matched
        waiting: dict[str, bool] = {}
        for tenant, heap in list(self._heaps.items()):
            if _head(heap) is None:
                del self._heaps[tenant], self._sizes[tenant]
            else:
                waiting[tenant] = over = self._shares.over(tenant)
                self._judge(tenant, over)
        entry = min(self._heaps[tenant][0] for tenant in self._shares.eligible(waiting))[-1]
        return entry.job, entry.matched

    def below(self, key: int) -> Sequence[Job]:
        """Those for whom the block `key` is the first that the server lacks."""
        return [entry.job for entry in self._below.get(key, {}).values()]

    def some(self, most: int) -> Sequence[tuple[Job, int]]:
        """Some of those that were filed first, and their matches."""
        return [(entry.job, entry.matched) for entry in islice(self._entries.values(), most)]

    def around(self, uncached: int, over: bool | None = None) -> tuple[float, float]:
        """Tokens of those that would go before a job that needs so many, and how many jobs would go
        after it, both nearly. Where it is said whether its tenant is `over` its share: such a one
        goes after all that are within theirs, and these before it. Else by size alone."""
        if self._order == "arrival":
            return self.tokens, 0.0
        size, within, beyond = uncached.bit_length(), self._within, self._over
        if over is None:
            ahead = within.ahead[size] + beyond.ahead[size]
            return ahead, within.behind[size] + beyond.behind[size]
        if over:
            return within.total + beyond.ahead[size], beyond.behind[size]
        return within.ahead[size], within.behind[size]

    def _rank(self, entry: _Entry) -> tuple[int, int, int]:
        """What goes first is least. Of equal work that with the deeper match, then the older."""
        if self._order == "arrival":
            return entry.job.priority, 0, 0
        return entry.job.priority, entry.uncached // self._block_size, -entry.matched

    def _missing(self, entry: _Entry) -> int | None:
        keys = entry.job.keys[self._block_size]
        return keys[entry.matched] if entry.matched < len(keys) else None

    def _drop(self, entry: _Entry) -> None:
        """Take an entry out of everything but the heaps, where it no longer waits."""
        entry.waits = False
        self.tokens -= entry.uncached
        self._count(entry, -1)
        key = self._missing(entry)
        if key is not None:
            siblings = self._below[key]
            del siblings[entry.job.id]
            if not siblings:
                del self._below[key]

    def _count(self, entry: _Entry, more: int) -> None:
        sizes, over = self._sizes[entry.job.tenant]
        size, tokens = entry.uncached.bit_length(), more * entry.uncached
        sizes.count(size, more, tokens)
        (self._over if over else self._within).count(size, more, tokens)

    def _judge(self, tenant: str, over: bool) -> None:
        """Count what waits of a tenant where it belongs now."""
        sizes, before = self._sizes[tenant]
        if over == before:
            return
        self._sizes[tenant] = sizes, over
        gains, loses = (self._over, self._within) if over else (self._within, self._over)
        for size, (jobs, tokens) in enumerate(zip(sizes.jobs, sizes.tokens, strict=True)):
            if jobs:
                gains.count(size, jobs, tokens)
                loses.count(size, -jobs, -tokens)


def _head(heap: list[Any]) -> _Entry | None:
    """The first that still waits; what does not is dropped on the way."""
    while heap:
        entry: _Entry = heap[0][-1]
        if entry.waits:
            return entry
        heappop(heap)
    return None


def _push(heap: list[Any], order: tuple[Any, ...], waiting: int) -> None:
    heappush(heap, order)
    if len(heap) > 2 * waiting + 64:  # of those that were filed again, or left
        heap[:] = [order for order in heap if order[-1].waits]
        heapify(heap)
