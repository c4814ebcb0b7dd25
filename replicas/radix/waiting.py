"""The requests that wait for admission, and whose turn it is."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Literal, Protocol

from hotbranch.keys import TOKEN_BYTES
from replicas.engine import Namespace
from replicas.radix.sequence import Sequence
from replicas.radix.tree import Node, common_blocks

REMATCHED = 16  # requests matched against the tree again in one step, at most

WINDOW = 128  # requests that dfs_weight puts in order, the oldest; matching all would be too slow

SAVING = ("longest_prefix", "dfs_weight")  # policies that save blocks from eviction

Policy = Literal["fcfs", "longest_prefix", "least_uncached", "dfs_weight"]


class Point(Protocol):
    """A place on a path of the cache; the older of two has the smaller serial."""

    @property
    def serial(self) -> int: ...


class Cache(Protocol):
    """What is cached, as far as the order of admission needs it: a `RadixTree`, or what is known of
    another engine's cache. `version` changes with what is in it."""

    @property
    def block_size(self) -> int: ...
    @property
    def version(self) -> int: ...

    def resident(self, namespace: Namespace, tokens: bytes, limit: int) -> int:
        """Cached leading tokens of `tokens`, whole blocks within `limit`."""

    def path(self, namespace: Namespace, tokens: bytes, limit: int) -> Seq[Point]:
        """Where they lie, from the root on."""


Order = tuple[int, int, int, float, int, "Work"]


@dataclass(slots=True, eq=False)
class Work:
    """A sequence and where it stands: it runs while it holds a `node` of the tree, else it waits.

    `data` is `sequence.tokens` as uint32 LE bytes, as of when it last began to wait. The first
    `owned` of its blocks belong to the tree.
    """

    sequence: Sequence
    serial: int
    max_tokens: int
    data: bytes = b""
    node: Node | None = None
    owned: int = 0
    matched: int = 0  # tokens it would reuse
    rank: int = WINDOW  # place in the order of dfs_weight
    seen: int = -1  # version of the tree that `matched` is of
    entry: Order | None = None  # its valid entry in the heap; none while it is deferred

    @property
    def remaining(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return len(self.sequence.tokens) - self.sequence.computed

    @property
    def yields(self) -> bool:
        """Whether it is less urgent than is usual."""
        return self.sequence.request.priority > 0

    @property
    def preempted(self) -> bool:
        """Whether it waits after having run."""
        return self.node is None and self.sequence.cached_tokens is not None


class WaitingQueue:
    """Order: preempted, unless it yields; overdue, oldest first; lower `priority`; then the policy.

    `longest_prefix` prefers the longest cached prefix and `least_uncached` the fewest tokens left
    to prefill; `dfs_weight` walks the cached tree depth first, the subtree that most wait for first
    (Zheng et al. 2024, section 3). Two of them save blocks from eviction; in a step for which all
    that runs and waits has `room` there is none to save, and they go by arrival, which is fairer.
    All three defer a request while a running one computes a block that it could reuse. `fcfs` is
    the plain baseline: arrival, nothing deferred. Matches are estimates: what comes to the front is
    matched again, and a few of the others in turn, so that a step costs the same however many wait.
    `tokens` sums what they have to prefill, `length` all their tokens.
    """

    def __init__(self, cache: Cache, policy: Policy, starvation_s: float) -> None:
        self.tokens = 0
        self.length = 0
        self._cache = cache
        self._policy = policy
        self._starvation_s = starvation_s
        self._works: dict[int, Work] = {}  # by arrival, but for the preempted
        self._heap: list[Order] = []
        self._rota: OrderedDict[int, Work] = OrderedDict()  # next to be matched again first
        self._deferred: list[Work] = []
        self._last: Work | None = None  # whose turn it was
        self._room = False
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Work) -> None:
        work.data = work.sequence.tokens.tobytes()
        self._works[work.sequence.request.id] = work
        self.tokens += len(work.sequence.tokens) - work.matched
        self.length += len(work.sequence.tokens)
        self._rematch(work)
        self._push(work)
        self._rota[work.sequence.request.id] = work
        self._priorities[work.sequence.request.priority] += 1

    def remove(self, work: Work) -> None:
        del self._works[work.sequence.request.id], self._rota[work.sequence.request.id]
        self.tokens -= len(work.sequence.tokens) - work.matched
        self.length -= len(work.sequence.tokens)
        work.entry = None
        self._priorities -= Counter((work.sequence.request.priority,))

    @property
    def most_urgent(self) -> int:
        """The lowest priority of at least one that waits."""
        return min(self._priorities)

    def overdue(self, work: Work, now: float) -> bool:
        """Whether it has waited, or run, for longer than anybody should wait."""
        return now - work.sequence.arrival > self._starvation_s

    def refresh(self, running: int, pool: int) -> None:
        """Before a step: let the deferred compete again, and match a few others, each in turn.

        `running` are the tokens of what runs, of a `pool` of so many: there is room while all that
        runs and waits fits at once, with as much again for what it becomes.
        """
        room = 2 * (running + self.length) <= pool
        if self._policy in SAVING and room != self._room:
            self._room = room
            self._reorder()
        deferred, self._deferred = self._deferred, []
        for work in deferred:
            if self._waits(work):
                self._rematch(work)
                self._push(work)
        for _ in range(min(REMATCHED, len(self._rota))):
            id, work = next(iter(self._rota.items()))
            self._rota.move_to_end(id)
            self._rematch(work)
        if self._policy == "dfs_weight" and not self._room:
            self._rank()

    def next(self, now: float, running: Iterable[Work]) -> Work | None:
        """Whose turn it is; None when nobody waits but for another's prefix."""
        oldest = next(iter(self._works.values()), None)
        overdue = oldest and self.overdue(oldest, now)
        while self._heap:
            work = self._heap[0][-1]
            if work.entry is not self._heap[0]:
                heappop(self._heap)
            elif work.preempted:
                return work
            elif overdue:
                return oldest
            elif not self._rematch(work) and not self._defer(work, running):
                self._last = work
                return work
        return None

    def _waits(self, work: Work) -> bool:
        return self._works.get(work.sequence.request.id) is work

    def _rematch(self, work: Work) -> bool:
        """Bring the match up to date; whether it changed."""
        if work.seen == self._cache.version:
            return False
        work.seen = self._cache.version
        namespace, limit = work.sequence.request.namespace, len(work.sequence.tokens) - 1
        matched = self._cache.resident(namespace, work.data, limit)
        if matched == work.matched:
            return False
        self._expect(work, matched)
        if work.entry is not None:
            self._push(work)
        return True

    def _expect(self, work: Work, matched: int) -> None:
        self.tokens += work.matched - matched
        work.matched = matched

    def _preference(self, work: Work) -> int:
        """What the policy puts first is least."""
        if self._room:
            return 0
        match self._policy:
            case "fcfs":
                return 0
            case "longest_prefix":
                return -work.matched
            case "least_uncached":
                return len(work.sequence.tokens) - work.matched
            case "dfs_weight":
                return work.rank

    def _rank(self) -> None:
        """Number the oldest requests in the order of a depth-first walk of what they match.

        Of the children of a node, the one that the last request went down comes first, then the one
        that most wait for; who waits for the node itself comes last.
        """
        window = list(islice(self._works.values(), WINDOW))
        paths = [self._path(work) for work in window]
        walked = set(self._path(self._last)) if self._last else set()
        weights = Counter(node for path in paths for node in path)
        end = (True, 1, 0)  # after any node
        order = sorted(
            range(len(window)),
            key=lambda i: [
                *((node not in walked, -weights[node], node.serial) for node in paths[i]),
                end,
            ],
        )
        for rank, i in enumerate(order):
            work = window[i]
            if work.rank != rank:
                work.rank = rank
                if work.entry is not None:
                    self._push(work)

    def _path(self, work: Work) -> Seq[Point]:
        return self._cache.path(work.sequence.request.namespace, work.data, work.matched)

    def _reorder(self) -> None:
        works = [entry[-1] for entry in self._heap if entry[-1].entry is entry]
        self._heap = []
        for work in works:
            self._push(work)

    def _push(self, work: Work) -> None:
        """Enter the heap with the current match; an older entry turns invalid."""
        if work.preempted and not work.yields:
            order = (0, 0, 0)
        else:
            order = (1, work.sequence.request.priority, self._preference(work))
        work.entry = (*order, work.sequence.arrival, work.serial, work)
        heappush(self._heap, work.entry)
        if len(self._heap) > 2 * len(self._works) + 64:
            self._heap = [entry for entry in self._heap if entry[-1].entry is entry]
            heapify(self._heap)

    def _defer(self, work: Work, running: Iterable[Work]) -> bool:
        """Put a request aside for this step when another computes a block that it could reuse.

        There is budget left, so what runs is computed to its end in this step: a deferral is short.
        Who yields is not, and others do not wait for it.
        """
        if self._policy == "fcfs":
            return False
        block = self._cache.block_size
        width = block * TOKEN_BYTES
        mine = work.data[: (len(work.data) - TOKEN_BYTES) // width * width]
        at = work.matched * TOKEN_BYTES
        longest = work.matched // block
        for other in running:
            if (
                (work.yields or not other.yields)
                and at < len(mine)
                and other.sequence.computed * TOKEN_BYTES < len(other.data)
                and other.data.startswith(mine[at : at + width], at)
                and other.sequence.request.namespace == work.sequence.request.namespace
            ):
                longest = max(longest, common_blocks(mine, other.data, 0, width))
        if longest * block == work.matched:
            return False
        self._expect(work, longest * block)
        work.entry, work.seen = None, -1
        self._deferred.append(work)
        return True
