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
from router.schedule.reuse import Reuse
from router.schedule.shares import Shares

Order = Literal["depth_first", "arrival"]
SIZES = 32  # powers of two that a prompt can need


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting job. `reuse` is of what the server has, or will have by then."""

    job: Job
    reuse: Reuse
    uncached: int  # tokens; what is to be loaded counts as its share
    waits: bool = True


class _Sizes:
    """Jobs by how much they need, in powers of two, summed up: read far more often than changed.

    `ahead` are the tokens of those that need less than a job of that size and half of those that
    need about as much, `behind` the number of the others. `total` are the tokens of all.
    """

    def __init__(self) -> None:
        self.ahead, self.behind = [0.0] * SIZES, [0.0] * SIZES
        self.total = 0

    def count(self, size: int, jobs: int, tokens: int) -> None:
        """Jobs of that size more, or less."""
        self.total += tokens
        ahead, behind = self.ahead, self.behind
        for other in range(size):
            behind[other] += jobs
        behind[size] += jobs / 2
        ahead[size] += tokens / 2
        for other in range(size + 1, SIZES):
            ahead[other] += tokens


class _Tenant:
    """What waits of it: in order, and by size. `over`: whether it counts as over its share."""

    def __init__(self, over: bool) -> None:
        self.heap: list[Any] = []
        self.over = over
        self.jobs, self.tokens = [0] * SIZES, [0] * SIZES


class BranchQueue:
    """Of a server with blocks of `block_size` tokens. Pure.

    What is reused is as of the last `file`; `tokens` sums what all need. `lacking` is common to all
    queues of a fleet: by a block's key, those where it is the first that somebody lacks.
    """

    def __init__(
        self,
        block_size: int,
        shares: Shares,
        order: Order = "depth_first",
        lacking: "dict[int, set[BranchQueue]] | None" = None,
    ) -> None:
        self.tokens = 0
        self._lacking = {} if lacking is None else lacking
        self._block_size = block_size
        self._shares = shares
        self._order = order
        self._entries: dict[int, _Entry] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._oldest: list[Any] = []
        self._below: dict[int, dict[int, _Entry]] = {}  # first block that is not there -> by job
        self._within, self._over = _Sizes(), _Sizes()  # of tenants within their share, and over it
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def file(self, job: Job, reuse: Reuse) -> None:
        """Add a job, or say which of its blocks the server has now."""
        known = self._entries.get(job.id)
        if known:
            if known.reuse == reuse:
                return
            self._drop(known)
        else:
            self._shares.entered(job.tenant)
        entry = _Entry(job, reuse, job.tokens - reuse.worth * self._block_size)
        self._entries[job.id] = entry
        self.tokens += entry.uncached
        if (tenant := self._tenants.get(job.tenant)) is None:
            tenant = self._tenants[job.tenant] = _Tenant(self._shares.over(job.tenant))
        self._count(entry, 1)
        if (key := self._missing(entry)) is not None:
            self._below.setdefault(key, {})[job.id] = entry
            self._lacking.setdefault(key, set()).add(self)
        age, waiting = (job.arrived, next(self._serial), entry), len(self._entries)
        _push(self._oldest, age, waiting)
        _push(tenant.heap, (*self._rank(entry), *age), waiting)

    def remove(self, job: Job) -> None:
        """A job goes, to the server or away. KeyError when it does not wait here."""
        self._drop(self._entries.pop(job.id))
        self._shares.left(job.tenant)

    def next(self, overdue_since: float) -> tuple[Job, Reuse] | None:
        """Whose turn it is, and its reuse: the oldest that arrived before `overdue_since`, else by
        priority the least that a tenant whose turn it may be has to compute."""
        oldest = _head(self._oldest)
        if oldest is None:
            self._tenants.clear()
            return None
        if oldest.job.arrived < overdue_since:
            return oldest.job, oldest.reuse
        for name, tenant in list(self._tenants.items()):
            if _head(tenant.heap) is None:
                del self._tenants[name]
            elif tenant.over != self._shares.over(name):
                self._flip(tenant)
        names = self._shares.eligible(self._tenants)
        entry = min(self._tenants[name].heap[0] for name in names)[-1]
        return entry.job, entry.reuse

    def below(self, key: int) -> Sequence[Job]:
        """Those for whom the block `key` is the first that the server lacks on its GPU."""
        return [entry.job for entry in self._below.get(key, {}).values()]

    def promised(self, keys: Sequence[int], held: int, guess: int) -> int:
        """Leading blocks of a prompt that the server will have once those that wait here have run,
        where it has `held` now and somebody lacks the next one: as many as the first of them has.
        The right `guess` spares a search."""
        sibling = next(iter(self._below[keys[held]].values()))
        return _common(keys, sibling.job.keys[self._block_size], held + 1, guess)

    def some(self, most: int) -> Sequence[tuple[Job, Reuse]]:
        """Some of those that were filed first, and their reuse."""
        return [(entry.job, entry.reuse) for entry in islice(self._entries.values(), most)]

    def around(self, uncached: int) -> tuple[float, float]:
        """Beside a job that needs so many tokens: the tokens of those that need less, and how many
        jobs need more, both nearly."""
        if self._order == "arrival":
            return self.tokens, 0.0
        size, within, over = uncached.bit_length(), self._within, self._over
        return within.ahead[size] + over.ahead[size], within.behind[size] + over.behind[size]

    def before(self, uncached: int, over: bool) -> float:
        """Tokens of those that would go before a job that needs so many, nearly. Where its tenant
        is `over` its share it goes after all that are within theirs, else before all that are not
        (as of the last look at whose turn it is).
        """
        if self._order == "arrival":
            return self.tokens
        size = uncached.bit_length()
        return self._within.total + self._over.ahead[size] if over else self._within.ahead[size]

    def _rank(self, entry: _Entry) -> tuple[int, int, int]:
        """What goes first is least. Of equal work that with the deeper match, then the older."""
        if self._order == "arrival":
            return entry.job.priority, 0, 0
        return entry.job.priority, entry.uncached // self._block_size, -entry.reuse.gpu

    def _missing(self, entry: _Entry) -> int | None:
        keys = entry.job.keys[self._block_size]
        return keys[entry.reuse.gpu] if entry.reuse.gpu < len(keys) else None

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
                self._lacking[key].discard(self)
                if not self._lacking[key]:
                    del self._lacking[key]

    def _count(self, entry: _Entry, more: int) -> None:
        tenant, size = self._tenants[entry.job.tenant], entry.uncached.bit_length()
        tenant.jobs[size] += more
        tenant.tokens[size] += more * entry.uncached
        self._class(tenant).count(size, more, more * entry.uncached)

    def _class(self, tenant: _Tenant) -> _Sizes:
        return self._over if tenant.over else self._within

    def _flip(self, tenant: _Tenant) -> None:
        """It is over its share now, or within it again."""
        counts = [*enumerate(zip(tenant.jobs, tenant.tokens, strict=True))]
        for size, (jobs, tokens) in counts:
            if jobs:
                self._class(tenant).count(size, -jobs, -tokens)
        tenant.over = not tenant.over
        for size, (jobs, tokens) in counts:
            if jobs:
                self._class(tenant).count(size, jobs, tokens)


def _common(one: Sequence[int], other: Sequence[int], least: int, guess: int) -> int:
    """Blocks that both begin with, at least `least`. A key says all before it, too."""
    most = min(len(one), len(other))
    if least <= guess <= most and one[guess - 1] == other[guess - 1]:
        least = guess
        if guess < most and one[guess] != other[guess]:
            return guess
    while least < most:
        middle = (least + most) // 2
        if one[middle] == other[middle]:
            least = middle + 1
        else:
            most = middle
    return least


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
