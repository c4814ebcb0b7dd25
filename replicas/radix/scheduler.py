"""Continuous batching over the radix tree: which tokens the next step computes, for whom.

Pure logic: no clock, no threads, no tensors. The caller alternates `plan` and `commit`; everything
else (`add`, `end`, the tree's own operations) comes between a commit and the next plan. Iteration
level batching is Orca's (Yu et al. 2022, section 3), chunked prefill beside decode is Sarathi's
(Agrawal et al. 2024, section 4), longest prefix first is SGLang's (Zheng et al. 2024, section 3).
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from hotbranch.keys import TOKEN_BYTES
from hotbranch.settings import EngineSettings
from replicas.engine import Finish, Load, Request
from replicas.radix.pool import BlockPool
from replicas.radix.sequence import Chunk, Sampled, Sequence
from replicas.radix.tree import RadixTree
from replicas.radix.waiting import Policy, WaitingQueue, Work

YIELDS = 8  # of a chunk, the part that a step prefills for who yields: who comes next waits less


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the scheduler. Sizes in tokens unless named otherwise."""

    block_size: int
    blocks: int
    max_context: int
    chunk_tokens: int
    max_running: int  # sequences
    policy: Policy
    starvation_s: float

    @classmethod
    def of(cls, settings: EngineSettings, max_context: int) -> "Limits":
        return cls(
            block_size=settings.block_size,
            blocks=settings.kv_tokens // settings.block_size,
            max_context=max_context,
            chunk_tokens=settings.chunk_tokens,
            max_running=settings.max_running,
            policy=settings.policy,
            starvation_s=settings.starvation_s,
        )


class NeverRuns(ValueError):
    """The request cannot run here, however long it waits."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What one step did to one request: a token, an end, or both."""

    sequence: Sequence
    sampled: Sampled | None = None
    finish: Finish | None = None
    error: str = ""


class Scheduler:
    """Owns the requests, the block pool and the radix tree."""

    def __init__(self, limits: Limits, eos: frozenset[int]) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.blocks)
        self.tree = RadixTree(
            limits.block_size, pin_limit=limits.blocks // 4, probation=limits.blocks * 3 // 4
        )
        self._eos = eos
        self._works: dict[int, Work] = {}
        self._running: list[Work] = []  # by arrival
        self._waiting = WaitingQueue(self.tree, limits.policy, limits.starvation_s)
        self._ended: list[Advance] = []
        self._serial = count()

    @property
    def idle(self) -> bool:
        return not self._works

    def add(self, request: Request, now: float) -> Sequence:
        """Queue a request. NeverRuns says why when it cannot ever run."""
        size, limits = len(request.prompt) // TOKEN_BYTES, self.limits
        if not size or len(request.prompt) % TOKEN_BYTES:
            raise NeverRuns("prompt is not one or more uint32 token ids")
        if request.sampling.max_tokens < 1:
            raise NeverRuns("max_tokens is less than 1")
        if size >= limits.max_context:
            raise NeverRuns(f"prompt of {size} tokens; the context is {limits.max_context}")
        if self._blocks(size) > limits.blocks:
            raise NeverRuns(f"prompt of {size} tokens is larger than the KV pool")
        sequence = Sequence(request, array("I", request.prompt), size, now)
        room = limits.max_context - size
        work = Work(sequence, next(self._serial), min(request.sampling.max_tokens, room))
        self._works[request.id] = work
        self._waiting.add(work)
        return sequence

    def end(self, id: int, now: float) -> Sequence | None:
        """End a request from outside, whatever its state; None when it is not here.

        Its full blocks stay cached.
        """
        work = self._works.pop(id, None)
        if work is None:
            return None
        if work.node is None:
            self._waiting.remove(work)
        else:
            self._withdraw(work, now)
        return work.sequence

    def plan(self, now: float) -> list[Chunk]:
        """The next step: one token of every decoding sequence, and prefill within the budget."""
        self.tree.expire(now)
        chunks = [
            Chunk(work.sequence, work.sequence.computed, work.sequence.computed + 1)
            for work in list(self._running)
            if work.remaining == 1 and work.node is not None and self._has_slot(work, now)
        ]
        # Prefill moves by a token at least, however many sequences decode.
        budget = max(1, self.limits.chunk_tokens - len(chunks))
        begun = self._prefills(now)
        running = sum(len(work.sequence.tokens) for work in self._running)
        self._waiting.refresh(running, self.limits.blocks * self.limits.block_size)
        urgent = False
        while budget and (work := self._next(begun, urgent, now)) is not None:
            if self._yields(work, now):
                budget = min(budget, max(1, self.limits.chunk_tokens // YIELDS))
            else:
                urgent = True
            budget -= _prefill(work, budget, chunks)
        return chunks

    def commit(self, chunks: Seq[Chunk], sampled: Seq[Sampled | None], now: float) -> list[Advance]:
        """Account for a computed plan, one sample for each chunk that reached its sequence's end.

        Also returns the requests that `plan` had to end. Chunks of requests that were ended in
        between are ignored.
        """
        advances, self._ended = self._ended, []
        for chunk, sample in zip(chunks, sampled, strict=True):
            sequence = chunk.sequence
            work = self._works.get(sequence.request.id)
            if work is None or work.sequence is not sequence:
                continue
            if chunk.samples != (sample is not None):
                raise ValueError("a sample is wanted exactly at the end of a sequence")
            sequence.computed = chunk.end
            self._store(work, now)
            if sample is not None:
                sequence.tokens.append(sample.token)
                finish = self._finish(work, sample.token)
                advances.append(Advance(sequence, sample, finish))
                if finish is not None:
                    self.end(sequence.request.id, now)
        return advances

    def load(self, step_s: float, prefill_s_per_token: float) -> Load:
        """Load figures; the two measured costs are the caller's."""
        prefill = sum(work.remaining for work in self._running if work.remaining > 1)
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            outstanding_tokens=self._waiting.tokens + prefill,
            used_blocks=self.limits.blocks - self._obtainable(),
            cached_blocks=self.tree.size,
            total_blocks=self.limits.blocks,
            step_s=step_s,
            prefill_s_per_token=prefill_s_per_token,
            evicted_blocks=self.tree.evicted,
            batch_context_tokens=sum(work.sequence.computed for work in self._running),
        )

    def flush(self, now: float) -> None:
        """Evict every block that no request holds, pinned or not."""
        self.pool.free(self.tree.flush(now))

    def _prefills(self, now: float) -> list[Work]:
        """Running requests whose prefill is not complete, the one that goes on first last.

        What is overdue first, then by priority, then by arrival; under `least_uncached` by what is
        left of it (shortest remaining processing time first, at the grain of a chunk).
        """
        works = [work for work in reversed(self._running) if work.remaining > 1]
        works.sort(
            key=lambda work: (
                not self._waiting.overdue(work, now),
                self._urgency(work, work.remaining),
            ),
            reverse=True,
        )
        return works

    def _urgency(self, work: Work, tokens: int) -> tuple[int, int]:
        """What is least goes first, of those that need so many tokens and are not overdue."""
        least_first = self.limits.policy == "least_uncached"
        return work.sequence.request.priority, tokens if least_first else 0

    def _next(self, begun: list[Work], urgent: bool, now: float) -> Work | None:
        """Whose prefill goes on, then out of `begun`, or begins. Who yields has no part in a step
        in which `urgent` ones prefill: that would make it longer for them.
        """
        last = begun[-1] if begun else None
        candidate = self._candidate(last, now)
        while candidate is not None and not (urgent and self._yields(candidate, now)):
            if self._admit(candidate, now):
                return candidate
            if self._running:
                break
            self._give_up(candidate, now)
            candidate = self._candidate(last, now)
        if last is None or (urgent and self._yields(last, now)):
            return None
        return begun.pop()

    def _candidate(self, begun: Work | None, now: float) -> Work | None:
        """The waiting request that goes before one whose prefill has begun, if any."""
        if len(self._running) >= self.limits.max_running:
            return None
        if begun is None:
            return self._waiting.next(now, self._running)
        if self._waiting.overdue(begun, now) or not len(self._waiting):
            return None
        priority = begun.sequence.request.priority
        if self.limits.policy != "least_uncached" and self._waiting.most_urgent >= priority:
            return None
        work = self._waiting.next(now, self._running)
        if work is None:
            return None
        uncached = len(work.sequence.tokens) - work.matched
        less = self._urgency(work, uncached) < self._urgency(begun, begun.remaining)
        return work if less else None

    def _yields(self, work: Work, now: float) -> bool:
        return work.yields and not self._waiting.overdue(work, now)

    def _has_slot(self, work: Work, now: float) -> bool:
        """Find a decoding sequence a slot for one token: take, evict, preempt, or end it."""
        sequence = work.sequence
        if sequence.computed < len(sequence.blocks) * self.limits.block_size:
            return True
        while not self._obtainable():
            victim = self._running[-1]
            if len(self._running) == 1:
                self._give_up(work, now)
                return False
            self._withdraw(victim, now)
            self._waiting.add(victim)
            if victim is work:
                return False
        sequence.blocks += self._take(1, now)
        return True

    def _give_up(self, work: Work, now: float) -> None:
        """End a request that does not fit although it is alone."""
        self.end(work.sequence.request.id, now)
        if work.sequence.generated:
            self._ended.append(Advance(work.sequence, finish=Finish.LENGTH))
        else:
            error = "prompt does not fit beside the pinned part of the KV pool"
            self._ended.append(Advance(work.sequence, finish=Finish.ERROR, error=error))

    def _withdraw(self, work: Work, now: float) -> None:
        """Stop running: what the tree owns stays there, the rest is freed."""
        assert work.node is not None
        sequence = work.sequence
        self._running.remove(work)
        self.tree.release(work.node, now)
        self.pool.free(sequence.blocks[work.owned :])
        sequence.blocks, sequence.computed = [], 0
        work.node, work.owned = None, 0

    def _store(self, work: Work, now: float) -> None:
        """Give full blocks to the tree; where a twin was faster, use its blocks."""
        sequence, size = work.sequence, self.limits.block_size
        first, full = work.owned, sequence.computed // size
        if full <= first:
            return
        assert work.node is not None
        tokens = sequence.tokens[first * size : full * size].tobytes()
        own = sequence.blocks[first:full]
        extension = self.tree.extend(work.node, tokens, own, now)
        twin = extension.resident
        self.pool.free(own[: len(twin)])
        sequence.blocks[first : first + len(twin)] = twin
        work.node, work.owned = extension.node, full

    def _finish(self, work: Work, token: int) -> Finish | None:
        sampling = work.sequence.request.sampling
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if work.sequence.generated >= work.max_tokens else None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _obtainable(self) -> int:
        return self.pool.available + self.tree.evictable

    def _take(self, blocks: int, now: float) -> list[int]:
        self.pool.free(self.tree.evict(blocks - self.pool.available, now))
        return self.pool.alloc(blocks)

    def _admit(self, work: Work, now: float) -> bool:
        """Start running, unless blocks are short.

        Every running sequence is left a block to decode into, so that admission does not cause
        preemption at once.
        """
        sequence = work.sequence
        limit = len(sequence.tokens) - 1
        prefix = self.tree.acquire(sequence.request.namespace, work.data, limit, now)
        need = self._blocks(len(sequence.tokens)) - len(prefix.blocks)
        if need + len(self._running) > self._obtainable():
            self.tree.release(prefix.node, now)
            return False
        self._waiting.remove(work)
        work.node, work.owned = prefix.node, len(prefix.blocks)
        sequence.blocks = prefix.blocks + self._take(need, now)
        sequence.computed = work.owned * self.limits.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        self._running.append(work)
        self._running.sort(key=lambda work: (work.sequence.arrival, work.serial))
        return True


def _prefill(work: Work, budget: int, chunks: list[Chunk]) -> int:
    """Plan up to `budget` tokens of a sequence; how many."""
    tokens = min(budget, work.remaining)
    start = work.sequence.computed
    chunks.append(Chunk(work.sequence, start, start + tokens))
    return tokens
