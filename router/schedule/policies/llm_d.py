"""The default profile of the llm-d router (llm-d inference scheduler)."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, PerServer, least
from router.schedule.policies.recent import Recent
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# pkg/epp/config/loader/defaults.go, the same in the gateway API inference extension
PREFIX_WEIGHT = 3.0
QUEUE_WEIGHT = 2.0
KV_CACHE_WEIGHT = 2.0
# approximateprefix/README.md; capacity while nothing was reported
MAX_PREFIX_TOKENS = 131_072
LRU_CAPACITY = 31_250


class LlmD(Immediate):
    """llm-d/llm-d-router, pkg/epp: the highest weighted sum of scores from 0 to 1 wins, a tie at
    random (max-score-picker).

    Prefix: the part of the prompt's blocks that was sent to the server recently, by an LRU of the
    router's own, with block size and capacity as the server reports them. Queue: the requests that
    wait, 1 for the fewest and 0 for the most, 1 for all where they are equal. KV cache: the part
    that is not in use. The latter two are as reported; what was sent since is not counted.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._recent: PerServer[Recent] = PerServer(Recent)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._recent.keep(servers)
        queues = [server.report.waiting if server.report else 0 for server in servers]
        low, high = min(queues), max(queues)
        costs = []
        for server, queue in zip(servers, queues, strict=True):
            shortness = (high - queue) / (high - low) if high > low else 1.0
            score = PREFIX_WEIGHT * self._prefix(job, server)
            score += QUEUE_WEIGHT * shortness + KV_CACHE_WEIGHT * (1 - _usage(server))
            costs.append(-score)
        return Placement(least(servers, costs, self._random), "score")

    def sent(self, job: Job, server: Server, now: float) -> None:
        capacity = server.report.total_blocks if server.report else 0
        self._recent.of(server).use(_blocks(job, server), capacity or LRU_CAPACITY)

    def _prefix(self, job: Job, server: Server) -> float:
        keys = _blocks(job, server)
        return self._recent.of(server).depth(keys) / len(keys) if keys else 0.0


def _blocks(job: Job, server: Server) -> Sequence[int]:
    return job.keys[server.block_size][: MAX_PREFIX_TOKENS // server.block_size]


def _usage(server: Server) -> float:
    report = server.report
    return report.used_blocks / report.total_blocks if report and report.total_blocks else 0.0
