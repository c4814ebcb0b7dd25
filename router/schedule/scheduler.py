"""Placing, holding and dispatching for a fleet: pure, under the caller's clock.

A policy says which server a job is for. Where the policy holds, jobs wait here, in the queue of
that server, and go out depth first while the server has less than `window` chunks of prefill ahead;
the choice is made again when a server has nothing to do. Else a job goes out at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Protocol

from router.fleet.holder import Holder
from router.index.index import Index
from router.schedule.branch_queue import BranchQueue, Order
from router.schedule.job import Job
from router.schedule.reuse import Reuse
from router.schedule.server import Report, Server
from router.schedule.shares import Shares

LOOKED_AT = 16  # jobs of the longest queue that an idle server considers, those that wait longest
LEVEL_S = 1.0  # between two looks at how fast servers are
ALIKE = 2.0  # measured speeds within this factor of the typical one are the same speed
LEAVES, FILLS = 0.25, 0.5  # of the window and of the cache, for a tenant over its share
OUTPUT = 2.0  # what a token of output is charged, in uncached tokens of prompt
REMATCHED = 8  # heads of a queue whose match had shrunk, looked at in one dispatch


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job is for, and why: one of the policy's reasons."""

    server: Server
    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A job goes out. `matched` blocks of it are there, in any tier, or on their way."""

    job: Job
    server: Server
    matched: int
    reason: str
    rank: int = 0  # what goes first there is least


class Policy(Protocol):
    """Chooses servers. `holds`: jobs wait at the router."""

    holds: bool

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        """One of at least one server. `matched` are leading blocks; none where it is missing. A
        server's lower tiers are holders of their own there, for `Server.reuse`."""

    def sent(self, job: Job, server: Server, now: float) -> None:
        """A job went out."""

    def ended(self, job: Job, server: Server, now: float) -> None:
        """It has finished, or was taken back."""


class Nowhere(Exception):
    """No server takes the job."""


class Full(Exception):
    """Too many jobs wait. In `seconds` a server has computed all it has and what waits for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__("too many requests wait")
        self.seconds = seconds


class Late(Exception):
    """It would not have its first token by its deadline."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`window` in chunks; seconds for the bound on waiting; tokens for the quantum of shares; jobs
    for the most that may wait."""

    window: float = 1.0
    starvation_s: float = 60.0
    order: Order = "depth_first"
    steals: bool = True
    quantum: float = 65_536.0
    most_waiting: float = inf


class FleetScheduler:
    """Owns the queues. What is sent, and what comes of it, the caller says."""

    def __init__(
        self, index: Index, policy: Policy, rules: Rules, weights: Mapping[str, float]
    ) -> None:
        self.servers: dict[Holder, Server] = {}
        self.waiting: dict[int, Server] = {}  # job -> where it waits
        self.stolen = 0
        self._index = index
        self._policy = policy
        self._rules = rules
        self._shares = Shares(weights, rules.quantum)
        self._reasons: dict[int, str] = {}
        self._lacking: dict[int, set[BranchQueue]] = {}  # as the queues keep it
        self._queues: dict[BranchQueue, Holder] = {}
        self._room, self._sizes = inf, set[int]()  # as in _joined
        self._level_at = 0.0
        self._typical = 0.0  # prefill seconds a token; 0 when none has measured it

    def add(
        self,
        holder: Holder,
        block_size: int,
        chunk_tokens: int,
        room: float = inf,
        offers: frozenset[str] = frozenset(),
    ) -> Server:
        """A server that the index knows. A prompt of `room` tokens is too long for it."""
        queue = BranchQueue(block_size, self._shares, self._rules.order, self._lacking)
        self._queues[queue] = holder
        server = Server(holder, block_size, chunk_tokens, queue, room, offers)
        self.servers[holder] = server
        self._joined()
        self._level()
        return server

    def remove(self, holder: Holder, now: float) -> tuple[list[Job], list[Dispatch]]:
        """A server is gone. The jobs that it had been sent are the caller's to place again or to
        end; those that waited for it are placed elsewhere, or returned too where no other takes
        them.
        """
        server = self.servers.pop(holder)
        self._joined()
        lost = [job for job, _ in server.sent.values()]
        for job in lost:
            self.ended(job, server, now)
        out: list[Dispatch] = []
        for job, _ in server.queue.some(len(server.queue)):
            self._take(job)
            del self._reasons[job.id]
            try:
                out += self._place(job, now)
            except Nowhere:
                lost.append(job)
        del self._queues[server.queue]
        return lost, out

    def _joined(self) -> None:
        """What fits all servers there are, so that most jobs need not be tried with each."""
        self._room = min((server.room for server in self.servers.values()), default=inf)
        self._sizes = {server.block_size for server in self.servers.values()}

    def cancel(self, job: Job) -> bool:
        """A job is not wanted any more; whether it still waited here."""
        if job.id not in self.waiting:
            return False
        self._take(job)
        del self._reasons[job.id]
        return True

    def arrive(self, job: Job, now: float) -> list[Dispatch]:
        """Place a job. Raises Nowhere, Full or Late."""
        if len(self.waiting) >= self._rules.most_waiting:
            raise Full(min((server.drained_s for server in self.servers.values()), default=0.0))
        if job.deadline < inf and now + self._soonest(job, self._matched(job)) > job.deadline:
            raise Late
        return self._place(job, now)

    def _soonest(self, job: Job, matched: Mapping[Holder, int]) -> float:
        """Seconds to its first token on the server that would have it first."""
        over = self._shares.over(job.tenant)
        return min(
            (
                server.first_token_s(_uncached(job, server, server.reuse(matched)), over)
                for server in self.servers.values()
                if server.takes(job)
            ),
            default=0.0,
        )

    def _place(self, job: Job, now: float) -> list[Dispatch]:
        servers = self._takers(job)
        if not servers:
            raise Nowhere
        self._index.expire(now)
        matched = self._matched(job)
        promised = self._promised(job, matched)
        placement = self._policy.choose(job, servers, promised, now)
        server = placement.server
        reuse = server.reuse(matched)
        if not self._policy.holds:
            return [self._send(job, server, reuse, placement.reason, now)]
        self._reasons[job.id] = placement.reason
        self._file(job, server, reuse)
        return [*self._pump(server, now), *self._steal(now)]

    def _takers(self, job: Job) -> list[Server]:
        """Where it may go. Where it fits nowhere, one that it has not been to says why."""
        servers = list(self.servers.values())
        anywhere = not job.avoids and not job.needs
        if anywhere and job.tokens < self._room and self._sizes <= job.keys.keys():
            return servers
        fit = [server for server in servers if server.takes(job)]
        return fit or [server for server in servers if server.serves(job)]

    def began(self, job: Job, server: Server, matched: int, cached: int, now: float) -> None:
        """The first token of a job is there: of its blocks `cached` were, of `matched` believed."""
        server.outstanding.settled(job.id)
        keys = job.keys[server.block_size]
        if cached < matched:
            self._index.missed(server.holder, keys, cached, now)
        self._index.computed(server.holder, keys, cached, now)

    def ended(self, job: Job, server: Server, now: float, generated: int = 0) -> None:
        """A job has finished, however, and `generated` tokens came of it. Idempotent."""
        server.outstanding.settled(job.id)
        server.memory.ended(job.id, generated)
        if server.sent.pop(job.id, None):
            self._shares.charge(job.tenant, OUTPUT * generated, now)
            self._policy.ended(job, server, now)

    def reported(self, server: Server, report: Report, now: float, ranks: int = 1) -> None:
        """A load report came, of `ranks` servers together."""
        new = not server.measured
        server.reported(report, ranks)
        if (new and server.measured) or now >= self._level_at:
            self._level_at = now + LEVEL_S
            self._level()
        else:
            self._judge(server)

    def _level(self) -> None:
        """Servers that are about as fast as is typical count as equally fast, and one that has
        measured nothing counts as typical. One judged slow would get no work and measure nothing
        new, so that noise would last for ever.
        """
        speeds = [server.measured for server in self.servers.values() if server.measured]
        self._typical = median(speeds) if speeds else 0.0
        for server in self.servers.values():
            self._judge(server)

    def _judge(self, server: Server) -> None:
        """Only another kind of machine counts as slower or faster."""
        typical = self._typical
        if not server.measured or typical / ALIKE <= server.measured <= typical * ALIKE:
            server.prefill_s_per_token = typical or server.prefill_s_per_token
        else:
            server.prefill_s_per_token = server.measured

    def pump(self, server: Server, now: float) -> list[Dispatch]:
        """What goes out now that something has changed at a server, also at one that is gone."""
        if not self._policy.holds:
            return []
        here = self._pump(server, now) if self.servers.get(server.holder) is server else []
        return [*here, *self._steal(now)]

    def _matched(self, job: Job) -> dict[Holder, int]:
        """Leading blocks by holder, of each tier. One token is always computed, to have logits to
        sample from."""
        found: dict[Holder, int] = {}
        for size, keys in job.keys.items():
            longest = (job.tokens - 1) // size
            for holder, depth in self._index.match(keys).depths().items():
                server = self.servers.get(holder) or self.servers.get(holder.server)
                if server is not None and server.block_size == size:
                    found[holder] = min(depth, longest)
        return found

    def _promised(self, job: Job, matched: Mapping[Holder, int]) -> Mapping[Holder, int]:
        """What is matched, and what those that wait for a server will bring: else a family whose
        first prompt waits would scatter."""
        promised = dict(matched)
        for size, keys in job.keys.items():
            longest, depth = (job.tokens - 1) // size, 0
            for held in {0, *matched.values()}:
                for queue in self._lacking.get(keys[held], ()) if held < len(keys) else ():
                    holder = self._queues[queue]
                    if matched.get(holder, 0) == held:
                        depth = queue.promised(keys, held, depth)
                        promised[holder] = min(depth, longest)
        return promised

    def _reuse(self, job: Job, server: Server) -> Reuse:
        return server.reuse(self._matched(job))

    def _file(self, job: Job, server: Server, reuse: Reuse) -> None:
        server.queue.file(job, reuse)
        self.waiting[job.id] = server

    def _take(self, job: Job) -> Server:
        server = self.waiting.pop(job.id)
        server.queue.remove(job)
        return server

    def _pump(self, server: Server, now: float) -> list[Dispatch]:
        """Send what waits while less than the window is to be computed before it there.

        A replica computes the least first, so that a long prompt does not keep short ones here.
        """
        out: list[Dispatch] = []
        looked = 0
        while (head := server.queue.next(now - self._rules.starvation_s)) is not None:
            job, believed = head
            if not self._has_room(server, job, believed, now):
                break
            reuse = self._reuse(job, server)
            if reuse.worth < believed.worth and looked < REMATCHED:
                looked += 1
                server.queue.file(job, reuse)
                continue
            self._take(job)
            out.append(self._send(job, server, reuse, self._reasons.pop(job.id), now))
        return out

    def _send(self, job: Job, server: Server, reuse: Reuse, reason: str, now: float) -> Dispatch:
        keys = job.keys[server.block_size]
        uncached = _uncached(job, server, reuse)
        self._index.predict(server.holder, keys, now)
        rank = self._rank(job)
        server.outstanding.sent(job.id, uncached, rank)
        added = _added(job, server, reuse)
        server.memory.sent(job.id, added)
        server.stored.sent(added, now)
        server.sent[job.id] = job, now
        self._shares.charge(job.tenant, uncached, now)
        self._policy.sent(job, server, now)
        if reuse.gpu < len(keys):
            for sibling in server.queue.below(keys[reuse.gpu]):
                server.queue.file(sibling, self._reuse(sibling, server))
        return Dispatch(job, server, reuse.blocks, reason, rank)

    def _has_room(self, server: Server, job: Job, reuse: Reuse, now: float) -> bool:
        """Less than the window is to be computed before it, and the cache has room for what it
        takes until it ends: else it would wait there, where none that is free can take it over. A
        tenant over its share leaves most of the window to others, for a step that runs delays
        whoever comes, and half of the cache. What is overdue need not fit: the replica makes room.
        """
        uncached = _uncached(job, server, reuse)
        before = server.outstanding.tokens
        if self._rules.order == "depth_first":
            before = server.outstanding.before(uncached, self._rank(job))
        window, memory = self._rules.window * server.ahead, server.memory
        if job.arrived < now - self._rules.starvation_s:
            return before < window
        if server.sent and _added(job, server, reuse) > memory.room:
            return False
        if not self._shares.over(job.tenant):
            return before < window
        return before < LEAVES * window and memory.used < FILLS * memory.total

    def _rank(self, job: Job) -> int:
        """What goes first at a server is least. Shares are of those policies that hold."""
        return job.priority * 2 + (self._policy.holds and self._shares.floods(job.tenant))

    def _steal(self, now: float) -> list[Dispatch]:
        """Servers that have nothing to do take from the longest queue what gains most by moving."""
        out: list[Dispatch] = []
        if not self._rules.steals or not self.waiting:
            return out
        for server in self.servers.values():
            if len(server.queue) or server.outstanding.tokens or server.memory.room < 0:
                continue
            victim = max(self.servers.values(), key=lambda server: server.queue.tokens)
            if not len(victim.queue):
                break
            if (job := self._gains_most(victim, server)) is not None:
                self._take(job)
                self._reasons[job.id] = "stolen"
                self._file(job, server, self._reuse(job, server))
                self.stolen += 1
                out += self._pump(server, now)
        return out

    def _gains_most(self, victim: Server, thief: Server) -> Job | None:
        """Its wait shrinks by more than what the thief has to compute again."""
        best, most = None, 0.0
        for job, reuse in victim.queue.some(LOOKED_AT):
            if not thief.takes(job):
                continue
            over = self._shares.over(job.tenant)
            here = _uncached(job, victim, reuse)
            there = _uncached(job, thief, self._reuse(job, thief))
            again = max(0, there - here) * thief.prefill_s_per_token
            saved = victim.first_token_s(here, over) - thief.first_token_s(there, over)
            gain = saved - again
            if gain > most:
                best, most = job, gain
        return best


def _uncached(job: Job, server: Server, reuse: Reuse) -> int:
    """Tokens to compute; those to load count as their share."""
    return job.tokens - reuse.worth * server.block_size


def _added(job: Job, server: Server, reuse: Reuse) -> int:
    """Tokens that it adds to what lies on the GPU."""
    return job.tokens - reuse.gpu * server.block_size
