"""LMETRIC."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, least
from router.schedule.scheduler import Placement
from router.schedule.server import Server


class LMetric(Immediate):
    """Zhang et al. 2026, "Simple is better: multiplication may be all you need for LLM request
    scheduling" (OSDI, arXiv:2603.15202), section 5.1, and its blitz-serving/blitz-router,
    router/src/scheduler/policies/lmetric.rs: the least product of P-token, the tokens to prefill if
    the prompt goes there, those that are queued included, and of the batch size, requests that run
    or wait and this one. Both count a prompt from when it was placed, as does that router. Its
    detector of hot spots, which switches affinity off, is left out: no trace of the paper but one
    sets it off.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        costs = []
        for server in servers:
            uncached = job.tokens - matched.get(server.holder, 0) * server.block_size
            costs.append((server.outstanding.ours + uncached) * (len(server.sent) + 1))
        return Placement(least(servers, costs, self._random), "product")
