"""One data-parallel rank of vLLM: what it caches, who waits for it, what its steps cost. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotbranch.kv_events.decode import Batch
from hotbranch.kv_events.translate import Translator
from replicas.engine import EvictedRun, Load, StoredRun
from replicas.radix.waiting import Policy
from replicas.step_cost import StepCost
from replicas.vllm.admission import Admission, Room
from replicas.vllm.mirror import Mirror
from replicas.vllm.pins import Pins


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of one rank is over. `usage` is the share of KV blocks that requests hold; `prefill`
    are the prompt tokens that it computed, in `seconds`."""

    rank: int
    usage: float
    prefill: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """Of the cache since the last drain; they apply in order: wiped, stored, evicted."""

    wiped: bool
    stored: Sequence[StoredRun]
    evicted: Sequence[EvictedRun]


class Rank:
    """What a replica knows of one rank. Reports travel: what it holds is as of its last events."""

    def __init__(
        self,
        number: int,
        model: str,
        block_size: int,
        room: Room,
        policy: Policy,
        starvation_s: float,
    ) -> None:
        self.number = number
        self.mirror = Mirror(block_size)
        self.admission = Admission(self.mirror, room, policy, starvation_s)
        self.pins = Pins(self.mirror, room.blocks)
        self._blocks = room.blocks
        self._used_blocks = 0
        self._translator = Translator(model, block_size)
        self._cost = StepCost()
        self._wiped = False
        self._stored: list[StoredRun] = []
        self._evicted: list[EvictedRun] = []

    @property
    def used_blocks(self) -> int:
        """Held by requests. vLLM tells of each step as it ends, not of what it frees after it."""
        return self._used_blocks if self.admission.running else 0

    def received(self, batch: Batch) -> None:
        """Events came, in order and without a gap."""
        changes = self._translator.apply(batch)
        if changes.cleared:
            self._empty()
        stored = [StoredRun(run.parent, run.keys, self.number, run.tier) for run in changes.stored]
        evicted = [EvictedRun(run.keys, self.number, run.tier) for run in changes.evicted]
        self.mirror.store(stored)
        self.mirror.evict(evicted)
        self._stored += stored
        self._evicted += evicted

    def reset(self) -> None:
        """The cache is about to be emptied on our demand. vLLM says so only with the events of its
        next step, which may be long in coming; until then its events tell of what was there."""
        self._translator.reset()
        self._empty()

    def reset_refused(self) -> None:
        """vLLM did not empty it: what it holds is told anew."""
        self._translator.reset_refused()
        self._wiped = True
        self.mirror.store(self.snapshot())

    def stepped(self, step: Stepped) -> None:
        """A step is over."""
        self.mirror.stepped()
        self._used_blocks = round(step.usage * self._blocks)
        if step.seconds:
            self._cost.observe(step.prefill, step.seconds)
        if step.prefill:
            self.admission.prefilled(step.prefill)

    def drain(self) -> Changes:
        """What has changed since the last drain."""
        changes = Changes(self._wiped, self._stored, self._evicted)
        self._wiped, self._stored, self._evicted = False, [], []
        return changes

    def snapshot(self) -> list[StoredRun]:
        """All that is held, parents before children."""
        return [
            StoredRun(run.parent, run.keys, self.number, run.tier)
            for run in self._translator.snapshot()
        ]

    def load(self) -> Load:
        admission = self.admission
        return Load(
            running=admission.running,
            waiting=admission.waiting,
            outstanding_tokens=admission.outstanding_tokens,
            used_blocks=self.used_blocks,
            cached_blocks=self.mirror.size,
            total_blocks=self._blocks,
            step_s=self._cost.step_s,
            prefill_s_per_token=self._cost.prefill_s_per_token,
            evicted_blocks=self.mirror.evicted,
            batch_context_tokens=admission.context_tokens,
        )

    def _empty(self) -> None:
        self.mirror.wipe()
        self.pins.clear()
        self._wiped, self._stored, self._evicted = True, [], []


def total(loads: Sequence[Load]) -> Load:
    """The load of all ranks together; a step costs what it costs on one."""
    return Load(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        outstanding_tokens=sum(load.outstanding_tokens for load in loads),
        used_blocks=sum(load.used_blocks for load in loads),
        cached_blocks=sum(load.cached_blocks for load in loads),
        total_blocks=sum(load.total_blocks for load in loads),
        step_s=max(load.step_s for load in loads),
        prefill_s_per_token=max(load.prefill_s_per_token for load in loads),
        evicted_blocks=sum(load.evicted_blocks for load in loads),
        batch_context_tokens=sum(load.batch_context_tokens for load in loads),
    )
