"""A fleet under a virtual clock: the router's own scheduler and index, the replica's own radix tree
and scheduler. Nothing is simulated but what a step takes, and the network.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from bench.fleet.traces import Arrival
from hotbranch.keys import root
from replicas.engine import Load, Namespace, Request, Sampling
from replicas.radix.scheduler import Advance, Limits
from replicas.radix.waiting import Policy as Admission
from replicas.simulated.profile import Profile
from replicas.simulated.virtual import Stepped, VirtualReplica
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
    """What is simulated. `block_size` in tokens; `admission` is the order within a replica.

    Requests come to the `routers` in turn; what a replica tells them, of its cache and of its load,
    is `report_s` old when it arrives.
    """

    replicas: int
    profile: Profile
    block_size: int
    admission: Admission
    rules: Rules
    starvation_s: float = 60.0
    routers: int = 1
    report_s: float = 0.0
    names: Sequence[str] = ()  # of the replicas, by which policies hash
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants


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


class Router:
    """A router's index and scheduler, and its requests that are open."""

    def __init__(self, fleet: Fleet, policy: Policy, limits: Limits) -> None:
        self.index = Index()
        self.scheduler = FleetScheduler(self.index, policy, fleet.rules, fleet.weights)
        self.open: dict[int, Dispatch] = {}
        self.servers: list[Server] = []
        for number in range(fleet.replicas):
            holder = Holder(fleet.names[number] if fleet.names else f"r{number}")
            self.index.add(holder, fleet.block_size, limits.blocks)
            self.index.replace(holder, [], 0.0)
            server = self.scheduler.add(holder, fleet.block_size, limits.chunk_tokens)
            self.servers.append(server)
        self.numbers = {server.holder: number for number, server in enumerate(self.servers)}

    def caches(self, number: int, stepped: Stepped, now: float) -> None:
        """What a replica has stored and evicted."""
        holder = self.servers[number].holder
        for run in stepped.stored:
            self.index.store(holder, run.parent, run.keys, now)
        if stepped.evicted:
            self.index.evict(holder, stepped.evicted)

    def loads(self, number: int, load: Load | None, now: float) -> Sequence[Dispatch]:
        """A step of a replica is over; now and then it says how busy it is."""
        server = self.servers[number]
        if load is not None:
            self.scheduler.reported(server, load, now)
        return self.scheduler.pump(server, now)


class Simulation:
    """Plays arrivals, which come in order of time, to their end. Each router has a policy."""

    def __init__(self, fleet: Fleet, policy: Callable[[], Policy]) -> None:
        self.served: list[Served] = []
        self.now = 0.0
        self.most_ahead = 0  # uncached tokens that a replica had to compute, at any report
        self._block_size = fleet.block_size
        self._report_s = fleet.report_s
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
        self.routers = [Router(fleet, policy(), limits) for _ in range(fleet.routers)]
        self._reported = [-LOAD_S] * fleet.replicas
        self._prompts: dict[int, bytes] = {}  # of those that wait at a router
        self._coming: list[tuple[float, int, Callable[[], None]]] = []  # time, serial, what happens
        self._serial = count()
        self._progress: Callable[[], None] = lambda: None

    def run(self, arrivals: Iterable[Arrival], progress: Callable[[], None]) -> list[Served]:
        """`progress` is called as each request ends."""
        self._progress = progress
        ahead = iter(arrivals)
        arrival = next(ahead, None)
        while arrival or self._coming:
            if arrival and (not self._coming or arrival.at <= self._coming[0][0]):
                self.now = arrival.at
                self._arrive(arrival)
                arrival = next(ahead, None)
            else:
                self.now, _, happen = heappop(self._coming)
                happen()
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
        router = self._router(id)
        self._send(router, router.scheduler.arrive(job, self.now))

    def _router(self, id: int) -> Router:
        return self.routers[id % len(self.routers)]

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heappush(self._coming, (time, next(self._serial), happen))

    def _send(self, router: Router, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            id, number = dispatch.job.id, router.numbers[dispatch.server.holder]
            served = self.served[id]
            served.replica, served.reason = number, dispatch.reason
            served.matched = dispatch.matched * self._block_size
            router.open[id] = dispatch
            sampling = Sampling(served.output, ignore_eos=True)
            request = Request(id, SPACE, self._prompts.pop(id), sampling, priority=dispatch.rank)
            self._replicas[number].add(request, self.now)
            self._begin_step(number)

    def _begin_step(self, number: int) -> None:
        replica = self._replicas[number]
        if not replica.stepping and not replica.idle:
            self._at(replica.begin(self.now), partial(self._end_step, number))

    def _end_step(self, number: int) -> None:
        replica, now = self._replicas[number], self.now
        stepped = replica.end(now)
        load = None
        if now - self._reported[number] >= LOAD_S or replica.idle:
            self._reported[number] = now
            load = replica.load()
            self.most_ahead = max(self.most_ahead, load.outstanding_tokens)
        for router in self.routers:
            if self._report_s:
                told = partial(self._told, router, number, stepped, load)
                self._at(now + self._report_s, told)
            else:
                router.caches(number, stepped, now)
        for advance in stepped.advances:
            self._advance(advance, number)
        for router in () if self._report_s else self.routers:
            self._send(router, router.loads(number, load, now))
        self._begin_step(number)

    def _told(self, router: Router, number: int, stepped: Stepped, load: Load | None) -> None:
        """A report of a replica has arrived, late."""
        router.caches(number, stepped, self.now)
        self._send(router, router.loads(number, load, self.now))

    def _advance(self, advance: Advance, number: int) -> None:
        """To the router of the request it goes at once: that is what its client gets."""
        id = advance.sequence.request.id
        served, router = self.served[id], self._router(id)
        scheduler, server = router.scheduler, router.servers[number]
        if advance.sampled and served.first >= 0:
            served.gap = max(served.gap, self.now - served.last)
            served.last = self.now
        elif advance.sampled:
            cached = advance.sequence.cached_tokens or 0
            served.first = served.last = self.now
            served.cached = cached
            blocks = cached // self._block_size
            dispatch = router.open[id]
            scheduler.began(dispatch.job, server, dispatch.matched, blocks, self.now)
        if advance.finish is not None:
            served.end, served.generated = self.now, advance.sequence.generated
            dispatch = router.open.pop(id)
            scheduler.ended(dispatch.job, server, self.now, served.generated)
            self._progress()
        if self._report_s and (advance.finish is not None or served.first == self.now):
            self._send(router, scheduler.pump(server, self.now))
