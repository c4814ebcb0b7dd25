"""`cache_aware` of the SGLang router, the default there and in SMG."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, PerServer, least
from router.schedule.policies.recent import Recent
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# sgl-router/py_src/sglang_router/router_args.py
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_SIZE = 2**26  # characters of a worker
CHARACTERS = 4  # of a token


class SglangThreshold(Immediate):
    """sgl-project/sglang, sgl-router/src/policies/{cache_aware,tree}.rs.

    Requests in flight that differ by more than an absolute and a relative threshold: the shortest
    queue. Else the worker with the longest match in a tree of what was routed to it, where that is
    more than a part of the prompt; else the one with the smallest tree. Loads are the router's own
    count; what workers report is not used. Here a tree is of blocks instead of characters, and too
    large a one shrinks at once instead of every two minutes.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._trees: PerServer[Recent] = PerServer(Recent)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._trees.keep(servers)
        size = min(job.keys)
        limit = MAX_TREE_SIZE // CHARACTERS // size
        placement = self._choose(job, servers, job.keys[size], size, limit)
        self._trees.of(placement.server).use(job.keys[size], limit)
        return placement

    def _choose(
        self, job: Job, servers: Sequence[Server], keys: Sequence[int], size: int, limit: int
    ) -> Placement:
        loads = [len(server.sent) for server in servers]
        low, high = min(loads), max(loads)
        if high - low > BALANCE_ABS_THRESHOLD and high > BALANCE_REL_THRESHOLD * low:
            return Placement(servers[loads.index(low)], "shortest_queue")
        depths = [self._trees.of(server).depth(keys) for server in servers]
        longest = max(depths)
        if longest:  # any of those that have it: there, the first of a hash map
            best = least(servers, [-depth for depth in depths], self._random)
            if longest * size > CACHE_THRESHOLD * job.tokens:
                return Placement(best, "match")
            self._trees.of(best).use(keys[:longest], limit)  # to look is to use
        sizes = [len(self._trees.of(server)) for server in servers]
        return Placement(least(servers, sizes, self._random), "smallest_tree")
