"""Our own policy: the lowest estimated time to the first token, the hot branch where that pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter

from xxhash import xxh3_64_intdigest

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.pace import DEAREST, RECURRING, Pace
from router.schedule.scheduler import Placement
from router.schedule.server import Server

LITTLE = 0.25  # of a prompt: a shorter match than this is no reason to follow it
TOLERANCE = 0.2  # of a cost, and of a prompt's price: what it may cost more to meet others, at most
HEAVIEST = 1 << 64  # no digest is so large
_TIER = attrgetter("tier")
SHORTER = 1.2  # times that a cache keeps what it has shorter than another: clearly
CROWD = 20.0  # steps that a request makes longer for each one that runs beside it


@dataclass(slots=True)
class Hotbranch:
    """Pure. `pace` is that of the jobs it has placed."""

    holds: bool = True
    pace: Pace = field(default_factory=Pace)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        """The server with the longest match wins while its cost exceeds the lowest by no more than
        the price of what its reuse saves: where the fleet has time to spare, a hot branch is copied
        to a further server as soon as its own has a queue, and one that cools is evicted there.
        Where the match is little of the prompt, or all have it, the prompt begins a branch: then
        the first of two rendezvous candidates wins (Thaler and Ravishankar 1998), or the second
        one, where the first is clearly dear or keeps what it has for a clearly shorter time. They
        go by the first block that nobody has: a family of prompts meets before any report is there,
        families spread.
        """
        depths, reach = _depths(servers, matched)
        self.pace.look(servers, now)
        at, reason = self._choose(job, servers, depths, reach, now)
        server = servers[at]
        uncached = job.tokens - depths[at]
        self.pace.placed(uncached * server.prefill_s_per_token, max(reach) / job.tokens, now)
        return Placement(server, reason)

    def _choose(
        self,
        job: Job,
        servers: Sequence[Server],
        depths: Sequence[int],
        reach: Sequence[int],
        now: float,
    ) -> tuple[int, str]:
        if len(servers) == 1:
            return 0, "only"
        price, crowd = self.pace.price, CROWD * self.pace.step_s
        costs = [
            server.cost_s(job.tokens - depth) + crowd * server.requests
            for server, depth in zip(servers, depths, strict=True)
        ]
        shared, least = max(reach), min(reach)
        cheapest = min(self._some(job, servers, range(len(servers))), key=costs.__getitem__)
        if shared - least < LITTLE * job.tokens:
            # What little is matched shall not draw all new branches to the server that has it.
            even = [
                cost + (depth - least) * server.prefill_s_per_token
                for cost, depth, server in zip(costs, reach, servers, strict=True)
            ]
            # One of many routers sees too little to tell that work is cheap.
            dear = price / DEAREST if self.pace.alone else 1.0
            extra = TOLERANCE * min(1.0, self.pace.found / RECURRING) * dear
            slack = extra * price * job.tokens * servers[cheapest].prefill_s_per_token
            home, second = _rendezvous(job, servers, shared)
            shorter = servers[home].turnover(now) > SHORTER * servers[second].turnover(now)
            if shorter and self.pace.alone:  # one of many sees little of what caches are sent
                home, second = second, home
            if even[home] > (1 + extra) * even[second] + slack:
                home = second
            if even[home] <= (1 + extra) * even[cheapest] + slack:
                return home, "rendezvous"
        longest = max(depths)
        holders = [i for i, depth in enumerate(depths) if depth == longest]
        hottest = min(self._some(job, servers, holders), key=costs.__getitem__)
        saved_s = (longest - depths[cheapest]) * servers[hottest].prefill_s_per_token
        if longest and costs[hottest] <= costs[cheapest] + price * saved_s:
            return hottest, "match"
        return cheapest, "cost"

    def _some(self, job: Job, servers: Sequence[Server], among: Sequence[int]) -> Sequence[int]:
        """All, or two by the luck of the draw where many routers place: they all see the same old
        report, and would bury the one that was idle then (Mitzenmacher 2000, "How useful is old
        information?")."""
        if self.pace.alone or len(among) <= 2:
            return among
        return nsmallest(2, among, key=lambda at: _weight(servers[at], job.id))

    def sent(self, job: Job, server: Server, now: float) -> None:
        pass

    def ended(self, job: Job, server: Server, now: float) -> None:
        pass


def _depths(
    servers: Sequence[Server], matched: Mapping[Holder, int]
) -> tuple[list[int], list[int]]:
    """By server, tokens that its match is worth, and tokens of it. Without lower tiers, as in most
    fleets, they are the same."""
    if not any(map(_TIER, matched)):
        depths = [matched.get(server.holder, 0) * server.block_size for server in servers]
        return depths, depths
    found = [(server.reuse(matched), server.block_size) for server in servers]
    depths = [reuse.worth * size for reuse, size in found]
    return depths, [reuse.blocks * size for reuse, size in found]


def _rendezvous(job: Job, servers: Sequence[Server], shared: int) -> tuple[int, int]:
    """The two of two or more that weigh least for the first block that nobody has."""
    firsts = {
        size: keys[shared // size] if shared // size < len(keys) else job.seed
        for size, keys in job.keys.items()
    }
    weights = [_weight(server, firsts[server.block_size]) for server in servers]
    home = weights.index(min(weights))
    weights[home] = HEAVIEST
    return home, weights.index(min(weights))


def _weight(server: Server, key: int) -> int:
    return xxh3_64_intdigest(server.label, key)
