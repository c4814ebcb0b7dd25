"""The KV router of NVIDIA Dynamo."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, PerServer, leading, least
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# docs/components/router/router-configuration.md; temperature 0 takes the least cost
OVERLAP_SCORE_CREDIT = 1.0
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

        cost = prefill_load_scale * max(active prefill + prompt - credit * overlap, 0) + decode

    in blocks, where decode are the blocks of all active prompts and this one. Overlap is what KV
    events tell. Like its slot tracker, which counts a prompt's uncached tokens from when it was
    routed until its first token, the active prefill is what was sent and has not begun. Ties are
    broken at random.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._active: PerServer[Active] = PerServer(Active)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._active.keep(servers)
        costs = [self._cost(job, server, matched.get(server.holder, 0)) for server in servers]
        return Placement(least(servers, costs, self._random), "cost")

    def sent(self, job: Job, server: Server, now: float) -> None:
        self._active.of(server).add(job.id, job.keys[server.block_size])

    def ended(self, job: Job, server: Server, now: float) -> None:
        if active := self._active.known(server):
            active.remove(job.id)

    def _cost(self, job: Job, server: Server, overlap: int) -> float:
        keys, blocks = job.keys[server.block_size], self._active.of(server).blocks
        prefill = (server.outstanding.ours + job.tokens) / server.block_size
        decode = len(blocks) + len(keys) - leading(keys, blocks)
        return PREFILL_LOAD_SCALE * max(prefill - OVERLAP_SCORE_CREDIT * overlap, 0.0) + decode
