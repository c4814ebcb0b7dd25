"""Our own policy: the lowest estimated time to the first token, the hot branch where that pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest

from xxhash import xxh3_64_intdigest

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.pace import Pace
from router.schedule.scheduler import Placement
from router.schedule.server import Server

LITTLE = 0.25  # of a prompt: a shorter match than this is no reason to follow it
TOLERANCE = 0.2  # of a cost, and of the price of the prompt: what it may cost more to meet others
RECURRING = 0.05  # of what prompts ask for is found somewhere: then they do meet others
CROWD = 4.0  # steps that a request costs each one that runs beside it


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
        one, unless it is clearly dear. They go by the first block that nobody has: a family of
        prompts meets before any report is there, families spread.
        """
        depths = [matched.get(server.holder, 0) * server.block_size for server in servers]
        price = self.pace.price(servers, now)
        at, reason = self._choose(job, servers, depths, price)
        server = servers[at]
        uncached = job.tokens - depths[at]
        self.pace.placed(uncached * server.prefill_s_per_token, max(depths) / job.tokens, now)
        return Placement(server, reason)

    def _choose(
        self, job: Job, servers: Sequence[Server], depths: Sequence[int], price: float
    ) -> tuple[int, str]:
        if len(servers) == 1:
            return 0, "only"
        step_s = step_s_each(servers)
        costs = [
            cost(server, job.tokens - depth, step_s)
            for server, depth in zip(servers, depths, strict=True)
        ]
        longest, cheapest = max(depths), min(range(len(servers)), key=costs.__getitem__)
        if longest - min(depths) < LITTLE * job.tokens:
            # What little is matched shall not draw all new branches to the server that has it.
            even = [
                cost + (depth - min(depths)) * server.prefill_s_per_token
                for cost, depth, server in zip(costs, depths, servers, strict=True)
            ]
            extra = TOLERANCE * min(1.0, self.pace.found / RECURRING)
            slack = extra * price * job.tokens * servers[cheapest].prefill_s_per_token
            home, second = _rendezvous(job, servers, longest)
            if even[home] > (1 + extra) * even[second] + slack:
                home = second
            if even[home] <= (1 + extra) * min(even) + slack:
                return home, "rendezvous"
        hottest = min(
            (i for i, depth in enumerate(depths) if depth == longest), key=costs.__getitem__
        )
        saved_s = (longest - depths[cheapest]) * servers[hottest].prefill_s_per_token
        if longest and costs[hottest] <= costs[cheapest] + price * saved_s:
            return hottest, "match"
        return cheapest, "cost"

    def sent(self, job: Job, server: Server, now: float) -> None:
        pass

    def ended(self, job: Job, server: Server, now: float) -> None:
        pass


def _rendezvous(job: Job, servers: Sequence[Server], shared: int) -> list[int]:
    """The two that weigh least for the first block that nobody has."""

    def weight(at: int) -> int:
        server = servers[at]
        keys = job.keys[server.block_size]
        first = shared // server.block_size
        key = keys[first] if first < len(keys) else job.seed
        return xxh3_64_intdigest(f"{server.holder.replica}/{server.holder.rank}".encode(), key)

    return nsmallest(2, range(len(servers)), key=weight)


def step_s_each(servers: Sequence[Server]) -> float:
    """Seconds of a decoding step for each request that runs, over all servers."""
    running = sum(len(server.sent) for server in servers)
    return sum(server.step_s for server in servers) / (running + len(servers))


def cost(server: Server, uncached: int, step_s_each: float) -> float:
    """Seconds to its first token, what it delays those that wait, and the crowd that it joins."""
    crowd = CROWD * step_s_each * len(server.sent)
    return server.first_token_s(uncached) + server.delay_s(uncached) + crowd
