"""Our own policy: the lowest estimated time to the first token, the hot branch where that pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from xxhash import xxh3_64_intdigest

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.scheduler import Placement
from router.schedule.server import Server

LITTLE = 0.25  # of a prompt: a shorter match than this is no reason to follow it
TOLERANCE = 1.2  # a new branch goes where the cost is up to so much above the lowest
PATIENCE_S = 0.05  # and this much


@dataclass(slots=True)
class Hotbranch:
    """`pull` is the part of what its reuse saves that the hottest match may cost more."""

    pull: float = 3.0
    holds: bool = True

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        """The server with the longest match wins while its cost exceeds the lowest by no more than
        a part of what its reuse saves. Where the match is little of the prompt, or all have it, the
        prompt begins a branch: then the first of two rendezvous candidates wins (Thaler and
        Ravishankar 1998), or the second one, unless it is clearly dear. They go by the first block
        that nobody has: a family of prompts meets before any report is there, families spread.
        """
        if len(servers) == 1:
            return Placement(servers[0], "only")
        depths = [matched.get(server.holder, 0) * server.block_size for server in servers]
        costs = [
            cost(server, job.tokens - depth) for server, depth in zip(servers, depths, strict=True)
        ]
        longest, cheapest = max(depths), min(range(len(servers)), key=costs.__getitem__)
        if longest - min(depths) < LITTLE * job.tokens:
            home, second = self._rendezvous(job, servers, longest)
            home = home if _near(costs[home], costs[second]) else second
            if _near(costs[home], costs[cheapest]):
                return Placement(servers[home], "rendezvous")
        hottest = min(
            (i for i, depth in enumerate(depths) if depth == longest), key=costs.__getitem__
        )
        saved = (longest - depths[cheapest]) * servers[hottest].prefill_s_per_token
        if costs[hottest] <= costs[cheapest] + self.pull * saved:
            return Placement(servers[hottest], "match")
        return Placement(servers[cheapest], "cost")

    def sent(self, job: Job, server: Server, now: float) -> None:
        pass

    def ended(self, job: Job, server: Server, now: float) -> None:
        pass

    def _rendezvous(self, job: Job, servers: Sequence[Server], shared: int) -> list[int]:
        """The two that weigh least for the first block that nobody has."""

        def weight(at: int) -> int:
            server = servers[at]
            keys = job.keys[server.block_size]
            first = shared // server.block_size
            key = keys[first] if first < len(keys) else job.seed
            return xxh3_64_intdigest(f"{server.holder.replica}/{server.holder.rank}".encode(), key)

        return nsmallest(2, range(len(servers)), key=weight)


def _near(one: float, other: float) -> bool:
    return one <= TOLERANCE * other + PATIENCE_S


def cost(server: Server, uncached: int) -> float:
    """Seconds to its first token, and what it delays others."""
    return server.first_token_s(uncached) + server.delay_s(uncached)
