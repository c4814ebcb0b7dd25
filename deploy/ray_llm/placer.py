"""Which replica of a Ray deployment a call goes to, where no replica reports anything.

Two stand-ins take the place of reports. The index takes what was sent to a replica for what an LRU
cache of its size holds (`router.index.history`). And each replica is taken to compute the prompts
that it was sent one after the other, at a fixed speed. Both are wrong in detail; what is compared
are replicas that are alike.
"""

import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from xxhash import xxh3_64_intdigest

from deploy.ray_llm.prompts import Prompt
from hotbranch.settings import RayLlmSettings
from router.fleet.holder import Holder
from router.index.chains import KeyChains
from router.index.index import Index
from router.schedule.branch_queue import BranchQueue
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.server import Server
from router.schedule.shares import Shares

# A decoding step, and what each request in it adds, in tokens of prefill that take as long: of 8B
# weights on an H100, at some 2,000 tokens of context (replicas/simulated/profiles).
STEP_TOKENS, LONGER_TOKENS = 330, 5
LEASE_S = 30.0  # a request that no replica is known to have accepted counts so long
REFUSED_S = 0.1  # one that ends sooner without having been accepted was refused, and not computed
CHUNK_TOKENS = 512  # of no consequence where nothing waits at the router


@dataclass(slots=True, eq=False)
class Sent:
    """A request that a replica has, or will have in a moment. `began` is when its prefill is taken
    to have ended."""

    job: Job
    server: Server
    request: str
    matched: int
    at: float
    began: float | None = None
    accepted: bool = False

    @property
    def replica(self) -> str:
        return self.server.holder.replica

    @property
    def keys(self) -> Sequence[int]:
        return self.job.keys[self.server.block_size]

    @property
    def uncached(self) -> int:
        return self.job.tokens - self.matched * self.server.block_size


@dataclass(slots=True, eq=False)
class _Replica:
    """`computing` are the prompts that it is taken to compute, the first since `since`."""

    server: Server
    computing: dict[int, Sent] = field(default_factory=dict)
    since: float = 0.0


class Placer:
    """Pure; the caller's clock, in seconds, never goes back. Replicas go by their names.

    Whoever is chosen is sent to (`send`) in the same moment, so that the next one is placed knowing
    of it; `take_back` undoes that. Several requests may share an id, also on one replica.
    """

    def __init__(self, settings: RayLlmSettings) -> None:
        self._settings = settings
        self._index = Index()
        self._policy = Hotbranch()
        self._chains = KeyChains()
        self._replicas: dict[str, _Replica] = {}
        self._open: dict[tuple[str, str], deque[Sent]] = {}  # by replica and request, oldest first
        self._leases: dict[int, Sent] = {}  # by job, oldest first
        self._ids = itertools.count(random.getrandbits(32))  # processes shall not draw alike

    @property
    def loads(self) -> dict[str, int]:
        """Requests that each replica has of ours."""
        return {name: len(replica.server.sent) for name, replica in self._replicas.items()}

    def add(self, name: str) -> None:
        """A replica is there, with an empty cache."""
        holder, size = Holder(name), self._settings.block_size
        self._index.add(holder, size, self._settings.kv_tokens // size)
        server = Server(holder, size, CHUNK_TOKENS, BranchQueue(size, Shares({}, inf)))
        server.prefill_s_per_token = self._settings.prefill_s_per_token
        server.memory.reported(0, self._settings.kv_tokens)
        self._replicas[name] = _Replica(server)

    def remove(self, name: str) -> None:
        """A replica is gone, and all that it had. Idempotent."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._index.remove(replica.server.holder)
        for job, _ in replica.server.sent.values():
            self._leases.pop(job.id, None)
        replica.server.sent.clear()
        self._open = {key: sent for key, sent in self._open.items() if key[0] != name}

    def job(self, prompt: Prompt | None, now: float) -> Job:
        """A job of a prompt; one of no tokens where there is none to go by."""
        size = self._settings.block_size
        if prompt is None:
            return Job(next(self._ids), 0, {size: ()}, now)
        keys = self._chains.keys(prompt.ids, size, prompt.seed)
        # Prompts without a whole block have no prefix in common.
        seed = prompt.seed if keys else xxh3_64_intdigest(prompt.ids, prompt.seed)
        return Job(next(self._ids), prompt.tokens, {size: keys}, now, seed=seed)

    def rank(self, job: Job, ongoing: Mapping[str, int], now: float) -> tuple[list[str], str]:
        """The replicas, best first, and why the first one is. `ongoing` are the requests that each
        has of everybody, as far as is known; there is at least one replica, and all were added."""
        self._advance(now)
        servers = [self._replicas[name].server for name in ongoing]
        for server, requests in zip(servers, ongoing.values(), strict=True):
            server.others = max(0, requests - len(server.sent))
            tokens = STEP_TOKENS + LONGER_TOKENS * server.requests
            server.step_s = tokens * server.prefill_s_per_token
        if not job.tokens:
            loads = {s: (s.requests, s.outstanding.tokens, random.random()) for s in servers}
            return [s.holder.replica for s in sorted(servers, key=loads.__getitem__)], "load"
        matched = self._matched(job)
        placement = self._policy.choose(job, servers, matched, now)
        costs = {
            server: server.cost_s(job.tokens - matched.get(server.holder, 0) * server.block_size)
            for server in servers
            if server is not placement.server
        }
        ranked = [placement.server, *sorted(costs, key=costs.__getitem__)]
        return [server.holder.replica for server in ranked], placement.reason

    def send(self, job: Job, name: str, request: str, now: float) -> Sent:
        """A job goes to a replica, for the request of that id."""
        replica = self._replicas[name]
        server = replica.server
        sent = Sent(job, server, request, self._matched(job).get(server.holder, 0), now)
        self._index.predict(server.holder, sent.keys, now)
        server.outstanding.sent(job.id, sent.uncached)
        server.memory.sent(job.id, sent.uncached)
        server.sent[job.id] = job, now
        if not replica.computing:
            replica.since = now
        replica.computing[job.id] = sent
        self._leases[job.id] = sent
        self._open.setdefault((name, request), deque()).append(sent)
        return sent

    def take_back(self, sent: Sent, now: float) -> None:
        """It did not go there after all. Idempotent."""
        if self._end(sent, now):
            self._index.withdraw(sent.server.holder, sent.keys)

    def accepted(self, name: str, request: str) -> None:
        """A replica has accepted a request: it will be told when that has ended."""
        for sent in reversed(self._open.get((name, request), ())):
            if not sent.accepted:
                sent.accepted = True
                self._leases.pop(sent.job.id, None)
                return

    def ended(self, name: str, request: str, now: float) -> None:
        """A request to a replica is over, however. Unknown ones are ignored."""
        if (requests := self._open.get((name, request))) is None:
            return
        self._advance(now)
        # Of what was accepted the end will surely be told, and must not be taken for another's.
        sent = next((one for one in requests if one.accepted), requests[0])
        if not sent.accepted and now - sent.at < REFUSED_S:
            self.take_back(sent, now)
        elif self._end(sent, now) and sent.began is None:
            self._computed(sent, now)

    def _matched(self, job: Job) -> dict[Holder, int]:
        """Leading blocks by holder. One token is always computed, to have logits to sample from."""
        size = self._settings.block_size
        longest = max(0, job.tokens - 1) // size
        depths = self._index.match(job.keys[size]).depths()
        return {holder: min(depth, longest) for holder, depth in depths.items()}

    def _advance(self, now: float) -> None:
        """What is computed by now is; who has waited too long to be accepted never was."""
        self._index.expire(now)
        for replica in self._replicas.values():
            for sent in list(replica.computing.values()):
                end = replica.since + sent.uncached * replica.server.prefill_s_per_token
                if end > now:
                    break
                del replica.computing[sent.job.id]
                replica.since = sent.began = end
                replica.server.outstanding.settled(sent.job.id)
                self._computed(sent, now)
        while self._leases and (sent := next(iter(self._leases.values()))).at <= now - LEASE_S:
            self._end(sent, now)

    def _computed(self, sent: Sent, now: float) -> None:
        self._index.computed(sent.server.holder, sent.keys, sent.matched, now)

    def _end(self, sent: Sent, now: float) -> bool:
        """It no longer counts; whether it did."""
        server, id = sent.server, sent.job.id
        if server.sent.pop(id, None) is None:
            return False
        replica = self._replicas[sent.replica]
        if id == next(iter(replica.computing), None):
            replica.since = now
        replica.computing.pop(id, None)
        self._leases.pop(id, None)
        key = sent.replica, sent.request
        self._open[key].remove(sent)
        if not self._open[key]:
            del self._open[key]
        server.outstanding.settled(id)
        running_s = 0.0 if sent.began is None else now - sent.began
        server.memory.ended(id, int(running_s / server.step_s) if server.step_s else 0)
        return True
