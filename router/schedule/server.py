"""A rank of a replica as the scheduler sees it: its last report, what was sent since, who waits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from hotbranch.v1.cache_pb2 import TIER_CPU, TIER_DISK
from router.fleet.holder import Holder
from router.fleet.memory import Memory
from router.fleet.outstanding import Outstanding
from router.fleet.turnover import Turnover
from router.schedule.branch_queue import BranchQueue
from router.schedule.job import Job
from router.schedule.reuse import Reuse

PREFILL_S_PER_TOKEN = 1e-4  # until some server has measured its own
AHEAD_S = 0.5  # of work in advance is enough for any: a slow one gets less than a chunk
FULL = 0.9  # of a cache, copies included: from here on what comes replaces something


class Report(Protocol):
    """What a replica reports ten times a second: some of the contract's Load."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def outstanding_tokens(self) -> int: ...
    @property
    def used_blocks(self) -> int: ...
    @property
    def cached_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def prefill_s_per_token(self) -> float: ...


@dataclass(slots=True, eq=False)
class Server:
    """`sent` are the jobs that it has of ours, each with the time when it was sent. A prompt of
    `room` tokens is too long for it. `offers` is what not every server does. `measured` is what it
    says of its speed, 0 when it does not.
    """

    holder: Holder
    block_size: int
    chunk_tokens: int
    queue: BranchQueue
    room: float = inf
    offers: frozenset[str] = frozenset()
    outstanding: Outstanding = field(default_factory=Outstanding)
    memory: Memory = field(default_factory=Memory)
    stored: Turnover = field(default_factory=Turnover)
    sent: dict[int, tuple[Job, float]] = field(default_factory=dict)
    report: Report | None = None
    measured: float = 0.0
    prefill_s_per_token: float = PREFILL_S_PER_TOKEN
    step_s: float = 0.0
    others: int = 0  # requests that it had from other routers, when it last reported
    label: bytes = field(init=False)  # its name, to be hashed
    cpu: Holder = field(init=False)  # it with what lies in its CPU's memory too
    disk: Holder = field(init=False)

    def __post_init__(self) -> None:
        replica, rank, _ = self.holder
        self.label = f"{replica}/{rank}".encode()
        self.cpu = Holder(replica, rank, TIER_CPU)
        self.disk = Holder(replica, rank, TIER_DISK)

    def reported(self, report: Report, ranks: int = 1) -> None:
        """A load report came, of so many ranks together."""
        self.report = report
        self.outstanding.reported(report.outstanding_tokens // ranks)
        blocks = report.used_blocks // ranks, report.total_blocks // ranks
        self.memory.reported(blocks[0] * self.block_size, blocks[1] * self.block_size)
        self.others = max(0, (report.running + report.waiting) // ranks - len(self.sent))
        self.measured = report.prefill_s_per_token or self.measured
        self.prefill_s_per_token = self.measured or self.prefill_s_per_token
        self.step_s = report.step_s or self.step_s

    def reuse(self, matched: Mapping[Holder, int]) -> Reuse:
        """What it has of a prompt, from leading blocks by holder; none where one is missing."""
        cpu = gpu = matched.get(self.holder, 0)
        if (depth := matched.get(self.cpu, 0)) > cpu:
            cpu = depth
        if (depth := matched.get(self.disk, 0)) > cpu:
            return Reuse(gpu, cpu - gpu, depth - cpu)
        return Reuse(gpu, cpu - gpu)

    def takes(self, job: Job) -> bool:
        """Whether the job may go to it, and fits."""
        return job.tokens < self.room and self.serves(job)

    def serves(self, job: Job) -> bool:
        """Whether the job may go to it: where a prompt is too long, it says so."""
        been = self.holder.replica in job.avoids
        return self.block_size in job.keys and job.needs <= self.offers and not been

    @property
    def requests(self) -> int:
        """That it has, of all routers."""
        return self.others + len(self.sent)

    @property
    def ahead(self) -> float:
        """Tokens to have it compute before it is sent more."""
        return min(self.chunk_tokens, AHEAD_S / self.prefill_s_per_token)

    def turnover(self, now: float) -> float:
        """The part of its cache that was replaced lately; 0 while there is room."""
        report = self.report
        if report is None or report.cached_blocks < FULL * report.total_blocks:
            return 0.0
        return self.stored.lately(now) / self.memory.total

    @property
    def drained_s(self) -> float:
        """Seconds of prefill that were sent here, or wait."""
        return (self.outstanding.tokens + self.queue.tokens) * self.prefill_s_per_token

    def first_token_s(self, uncached: int, over: bool = False) -> float:
        """Seconds until the first token of a request that needs so much prefill, sent here now:
        what was sent before it, what waits before it, itself, a step of the running batch, and
        room for what it takes. `over`: whether its tenant is over its share."""
        return self._seconds(self.queue.before(uncached, over) + uncached)

    def cost_s(self, uncached: int) -> float:
        """Seconds until its first token, and those that it adds to all that wait here and go after
        it, taken together."""
        ahead, behind = self.queue.around(uncached)
        return self._seconds(ahead + uncached) + uncached * behind * self.prefill_s_per_token

    def _seconds(self, tokens: float) -> float:
        """Until so many more are computed."""
        seconds = (self.outstanding.tokens + tokens) * self.prefill_s_per_token
        if self.sent or self.others:
            seconds += self.step_s
            if tokens > self.memory.room:
                seconds += self.memory.wait_s(tokens, self.step_s)
        return seconds
