"""Which waiting request goes to vLLM next, and when. Pure: the caller tells it what happened.

vLLM reorders nothing by what is cached, and what it has admitted it evicts for what comes next. So
requests wait here, in the order of the radix engine, and go in a little ahead of need: enough that
no step runs short of prefill, too little for a queue inside.
"""

from array import array
from dataclasses import dataclass
from itertools import count

from hotbranch.keys import TOKEN_BYTES
from replicas.engine import Request
from replicas.radix.sequence import Sequence
from replicas.radix.tree import common_blocks
from replicas.radix.waiting import Policy, WaitingQueue, Work
from replicas.vllm.mirror import Mirror

AHEAD = 2  # chunks of prefill that vLLM has: the step that runs, and the next one
OVERDUE = -(1 << 31)  # the priority of a request that has waited too long: before any other


@dataclass(frozen=True, slots=True)
class Room:
    """What vLLM can take. `chunk_tokens` are prefilled in a step, at most."""

    blocks: int
    chunk_tokens: int
    max_running: int


@dataclass(slots=True, eq=False)
class Admitted:
    """A request in vLLM. `ahead` is the prefill, in tokens, that it still waits for there."""

    work: Work
    priority: int
    ahead: int

    @property
    def begun(self) -> bool:
        """Whether its first token has come."""
        return self.work.sequence.computed > 0


class Admission:
    """The requests of one rank: those that wait, and those in vLLM."""

    def __init__(self, mirror: Mirror, room: Room, policy: Policy, starvation_s: float) -> None:
        self._mirror = mirror
        self._room = room
        self._queue = WaitingQueue(mirror, policy, starvation_s)
        self._waiting: dict[int, Work] = {}
        self._admitted: dict[int, Admitted] = {}
        self._serial = count()
        self.context_tokens = 0  # of what has begun, prompts and replies together

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._admitted)

    @property
    def ahead(self) -> int:
        """Tokens of prefill that vLLM has been given and not computed."""
        return sum(admitted.ahead for admitted in self._admitted.values())

    @property
    def outstanding_tokens(self) -> int:
        """Uncached prompt tokens still to prefill, waiting and admitted."""
        return self._queue.tokens + self.ahead

    def add(self, request: Request, now: float) -> None:
        """A request begins to wait."""
        tokens = array("I", request.prompt)
        sequence = Sequence(request, tokens, len(tokens), now)
        work = Work(sequence, next(self._serial), request.sampling.max_tokens)
        self._waiting[request.id] = work
        self._queue.add(work)

    def next(self, used_blocks: int, now: float) -> Admitted | None:
        """The request to hand to vLLM now, if any; it counts as handed over.

        `used_blocks` are held by what runs in vLLM, as of its last step.
        """
        if not self._waiting or len(self._admitted) >= self._room.max_running:
            return None
        ahead = self.ahead
        if ahead >= AHEAD * self._room.chunk_tokens:
            return None
        running = sum(len(one.work.sequence.tokens) for one in self._admitted.values())
        self._queue.refresh(running, self._room.blocks * self._mirror.block_size)
        work = self._queue.next(now, [admitted.work for admitted in self._admitted.values()])
        if work is None or not self._fits(work, ahead, used_blocks, now):
            return None
        self._queue.remove(work)
        id = work.sequence.request.id
        del self._waiting[id]
        priority = OVERDUE if self._queue.overdue(work, now) else work.sequence.request.priority
        uncached = len(work.sequence.tokens) - work.matched
        admitted = self._admitted[id] = Admitted(work, priority, uncached)
        return admitted

    def prefilled(self, tokens: int) -> None:
        """A step has computed so much prefill, of those that were admitted first."""
        for admitted in self._admitted.values():
            # The last token of a prompt is told by its first output alone.
            done = min(tokens, max(0, admitted.ahead - 1))
            admitted.ahead -= done
            tokens -= done
            if not tokens:
                return

    def generated(self, id: int, tokens: int) -> None:
        """A request in vLLM has got so many tokens."""
        admitted = self._admitted.get(id)
        if admitted is None or not tokens:
            return
        sequence = admitted.work.sequence
        if not admitted.begun:
            admitted.ahead = 0
            sequence.computed = sequence.prompt_len
            self._mirror.computed(sequence.request.namespace, sequence.request.prompt)
            self.context_tokens += sequence.prompt_len
        sequence.computed += tokens
        self.context_tokens += tokens

    def end(self, id: int) -> bool:
        """A request ends, wherever it is; whether it was here."""
        if (work := self._waiting.pop(id, None)) is not None:
            self._queue.remove(work)
            return True
        admitted = self._admitted.pop(id, None)
        if admitted is not None:
            self.context_tokens -= admitted.work.sequence.computed
        return admitted is not None

    def _fits(self, work: Work, ahead: int, used_blocks: int, now: float) -> bool:
        """Whether vLLM can begin it at once. What it could not begin would wait there, where others
        can no longer go first. Who yields goes in only while nobody else waits for prefill."""
        if not self._admitted:
            return True
        if work.yields and ahead and not self._queue.overdue(work, now):
            return False
        coming = sum(self._blocks(admitted.ahead) for admitted in self._admitted.values())
        free = self._room.blocks - used_blocks - coming - len(self._admitted)
        need = self._blocks(len(work.sequence.tokens))
        return need <= free or need - self._shared(work) <= free

    def _shared(self, work: Work) -> int:
        """Leading blocks that a request in vLLM holds already."""
        width = self._mirror.block_size * TOKEN_BYTES
        matched = work.data[: work.matched * TOKEN_BYTES]
        shared = 0
        for admitted in self._admitted.values():
            other = admitted.work
            if other.sequence.request.namespace == work.sequence.request.namespace:
                shared = max(shared, common_blocks(matched, other.data, 0, width))
        return shared

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._mirror.block_size)
