"""A fleet under a virtual clock: the router's own scheduler and index, the replica's own radix tree
and scheduler. Nothing is simulated but what a step takes, and the network.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from bench.fleet.traces import Arrival
from hotbranch.keys import root
from replicas.engine import Namespace, Request, Sampling
from replicas.radix.scheduler import Advance, Limits
from replicas.radix.waiting import Policy as Admission
from replicas.simulated.profile import Profile
from replicas.simulated.virtual import VirtualReplica
from router.fleet.holder import Holder
from router.index.chains import KeyChains
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.scheduler import Dispatch, FleetScheduler, Policy, Rules
from router.schedule.server import Server

SPACE = Namespace("simulated")
SEED = root("simulated")
LOAD_S = 0.1  # between two load reports of a replica, while it works


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated. `block_size` in tokens; `admission` is the order within a replica."""

    replicas: int
    profile: Profile
    block_size: int
    admission: Admission
    rules: Rules
    starvation_s: float = 60.0


@dataclass(slots=True)
class Served:
    """What became of one request. Sizes in tokens, times in seconds from the start of the trace."""

    at: float
    tenant: str
    tokens: int
    output: int
    replica: int = -1
    reason: str = ""
    matched: int = 0  # tokens believed to be there
    cached: int = 0  # tokens that were
    first: float = -1.0  # of its first token; never where it failed
    last: float = -1.0  # of its last one so far
    end: float = -1.0
    gap: float = 0.0  # the longest between two of its tokens
    generated: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def inter_token(self) -> float:
        """Seconds from one token to the next, in the mean; 0 of a single token."""
        return (self.last - self.first) / max(1, self.generated - 1)


class Simulation:
    """Plays arrivals, which come in order of time, to their end."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.served: list[Served] = []
        self.now = 0.0
        self._block_size = fleet.block_size
        self._index = Index()
        self.scheduler = FleetScheduler(self._index, policy, fleet.rules, {})
        self._chains = KeyChains()
        limits = Limits(
            block_size=fleet.block_size,
            blocks=fleet.profile.kv_tokens // fleet.block_size,
            max_context=fleet.profile.kv_tokens,  # a few recorded prompts exceed the model's own
            chunk_tokens=fleet.profile.chunk_tokens,
            max_running=256,
            policy=fleet.admission,
            starvation_s=fleet.starvation_s,
        )
        self._replicas = [VirtualReplica(fleet.profile, limits) for _ in range(fleet.replicas)]
        self._servers: list[Server] = []
        for number in range(fleet.replicas):
            holder = Holder(f"r{number}")
            self._index.add(holder, fleet.block_size, limits.blocks)
            self._index.replace(holder, [], 0.0)
            self.scheduler.add(holder, fleet.block_size, limits.chunk_tokens)
            self._servers.append(self.scheduler.servers[holder])
        self._numbers = {server.holder: i for i, server in enumerate(self._servers)}
        self._reported = [-LOAD_S] * fleet.replicas
        self._prompts: dict[int, bytes] = {}  # of those that wait at the router
        self._open: dict[int, Dispatch] = {}
        self._ends: list[tuple[float, int, int]] = []  # of steps: time, serial, replica
        self._serial = count()

    def run(self, arrivals: Iterable[Arrival], progress: Callable[[], None]) -> list[Served]:
        """`progress` is called as each request ends."""
        coming = iter(arrivals)
        arrival = next(coming, None)
        while arrival or self._ends:
            if arrival and (not self._ends or arrival.at <= self._ends[0][0]):
                self.now = arrival.at
                self._arrive(arrival)
                arrival = next(coming, None)
            else:
                self.now, _, number = heappop(self._ends)
                self._end_step(number, progress)
        return self.served

    def _arrive(self, arrival: Arrival) -> None:
        id = len(self.served)
        self.served.append(Served(self.now, arrival.tenant, arrival.tokens, arrival.output))
        self._prompts[id] = arrival.prompt
        keys = self._chains.keys(arrival.prompt, self._block_size, SEED)
        job = Job(
            id,
            arrival.tokens,
            {self._block_size: keys},
            self.now,
            arrival.tenant,
            seed=SEED,
            session=arrival.session,
        )
        self._send(self.scheduler.arrive(job, self.now))

    def _send(self, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            id, number = dispatch.job.id, self._numbers[dispatch.server.holder]
            served = self.served[id]
            served.replica, served.reason = number, dispatch.reason
            served.matched = dispatch.matched * self._block_size
            self._open[id] = dispatch
            sampling = Sampling(served.output, ignore_eos=True)
            request = Request(id, SPACE, self._prompts.pop(id), sampling, priority=dispatch.rank)
            self._replicas[number].add(request, self.now)
            self._begin_step(number)

    def _begin_step(self, number: int) -> None:
        replica = self._replicas[number]
        if not replica.stepping and not replica.idle:
            heappush(self._ends, (replica.begin(self.now), next(self._serial), number))

    def _end_step(self, number: int, progress: Callable[[], None]) -> None:
        replica, server, now = self._replicas[number], self._servers[number], self.now
        stepped = replica.end(now)
        for run in stepped.stored:
            self._index.store(server.holder, run.parent, run.keys, now)
        if stepped.evicted:
            self._index.evict(server.holder, stepped.evicted)
        for advance in stepped.advances:
            self._advance(advance, server)
            if advance.finish is not None:
                progress()
        if now - self._reported[number] >= LOAD_S or replica.idle:
            self._reported[number] = now
            self.scheduler.reported(server, replica.load(), now)
        self._send(self.scheduler.pump(server, now))
        self._begin_step(number)

    def _advance(self, advance: Advance, server: Server) -> None:
        id = advance.sequence.request.id
        served = self.served[id]
        if advance.sampled and served.first >= 0:
            served.gap = max(served.gap, self.now - served.last)
            served.last = self.now
        elif advance.sampled:
            cached = advance.sequence.cached_tokens or 0
            served.first = served.last = self.now
            served.cached = cached
            blocks = cached // self._block_size
            dispatch = self._open[id]
            self.scheduler.began(dispatch.job, server, dispatch.matched, blocks, self.now)
        if advance.finish is not None:
            served.end, served.generated = self.now, advance.sequence.generated
            dispatch = self._open.pop(id)
            self.scheduler.ended(dispatch.job, server, self.now, served.generated)
