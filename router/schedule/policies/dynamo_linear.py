"""The KV router of NVIDIA Dynamo."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, PerServer, leading, least
from router.schedule.reuse import Reuse
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# docs/components/router/router-configuration.md; temperature 0 takes the least cost
OVERLAP_SCORE_CREDIT = 1.0
HOST_CACHE_HIT_WEIGHT = 0.75
DISK_CACHE_HIT_WEIGHT = 0.25
PREFILL_LOAD_SCALE = 1.0


class Active:
    """The blocks of the prompts that a server works on. What prompts share counts once."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}  # key -> prompts that have it
        self._prompts: dict[int, Sequence[int]] = {}  # by job

    def add(self, job: int, keys: Sequence[int]) -> None:
        """A prompt was sent."""
        self._prompts[job] = keys
        for key in keys:
            self.blocks[key] = self.blocks.get(key, 0) + 1

    def remove(self, job: int) -> None:
        """A prompt is gone; one that is not known is ignored."""
        for key in self._prompts.pop(job, ()):
            self.blocks[key] -= 1
            if not self.blocks[key]:
                del self.blocks[key]


class DynamoLinear(Immediate):
    """ai-dynamo/dynamo, docs/components/router/router-concepts.md, "Cost Calculation";
    lib/kv-router/src/scheduling/selector/default.rs.

        cost = prefill_load_scale * max(active prefill + prompt - credit, 0) + decode

    in blocks, where decode are the blocks of all active prompts and this one. Credit is the overlap
    that KV events tell of, less for what host memory or disk has beyond it. Like its slot tracker,
    which counts a prompt's uncached tokens from when it was routed until its first token, the
    active prefill is what was sent and has not begun. Ties are broken at random.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._active: PerServer[Active] = PerServer(Active)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._active.keep(servers)
        costs = [self._cost(job, server, server.reuse(matched)) for server in servers]
        return Placement(least(servers, costs, self._random), "cost")

    def sent(self, job: Job, server: Server, now: float) -> None:
        self._active.of(server).add(job.id, job.keys[server.block_size])

    def ended(self, job: Job, server: Server, now: float) -> None:
        if active := self._active.known(server):
            active.remove(job.id)

    def _cost(self, job: Job, server: Server, reuse: Reuse) -> float:
        keys, blocks = job.keys[server.block_size], self._active.of(server).blocks
        prefill = (server.outstanding.ours + job.tokens) / server.block_size
        decode = len(blocks) + len(keys) - leading(keys, blocks)
        credit = OVERLAP_SCORE_CREDIT * reuse.gpu
        credit += HOST_CACHE_HIT_WEIGHT * reuse.cpu + DISK_CACHE_HIT_WEIGHT * reuse.disk
        return PREFILL_LOAD_SCALE * max(prefill - credit, 0.0) + decode
