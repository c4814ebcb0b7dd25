"""A replica under the caller's clock: the radix tree and its scheduler, without thread or model.

What a step takes, the profile says. Which tokens come out does not matter here, only how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.engine import Load, Request, StoredRun
from replicas.radix.scheduler import Advance, Limits, Scheduler
from replicas.radix.sequence import Chunk, Sampled, prefill_tokens
from replicas.simulated.profile import Profile
from replicas.step_cost import StepCost

TOKEN = Sampled(1)


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step did: to requests, and to the cache."""

    advances: Sequence[Advance]
    stored: Sequence[StoredRun]
    evicted: Sequence[int]


class VirtualReplica:
    """Alternates `begin` and `end` while it is busy; requests may be added at any time."""

    def __init__(self, profile: Profile, limits: Limits) -> None:
        self.scheduler = Scheduler(limits, frozenset())
        self.stepping = False
        self._profile = profile
        self._cost = StepCost()
        self._chunks: list[Chunk] = []
        self._began = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle

    def add(self, request: Request, now: float) -> None:
        """Raises NeverRuns."""
        self.scheduler.add(request, now)

    def begin(self, now: float) -> float:
        """Plan a step; when it ends."""
        self._chunks = self.scheduler.plan(now)
        self._began, self.stepping = now, True
        return now + self._profile.seconds(self._chunks)

    def end(self, now: float) -> Stepped:
        """The step that was begun has been computed."""
        chunks, self._chunks, self.stepping = self._chunks, [], False
        self._cost.observe(prefill_tokens(chunks), now - self._began)
        samples = [TOKEN if chunk.samples else None for chunk in chunks]
        advances = self.scheduler.commit(chunks, samples, now)
        return Stepped(advances, *self.scheduler.tree.changes.drain())

    def load(self) -> Load:
        """As the replica reports it."""
        return self.scheduler.load(self._cost.step_s, self._cost.prefill_s_per_token)
