"""From a tokenised prompt to a replica that generates: keys, a place, a turn, a route.

The fleet's scheduler decides, once for each model; here its decisions meet the links.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf
from typing import Any, Generic

from hotbranch.keys import TOKEN_BYTES, root
from hotbranch.log import event
from hotbranch.v1.replica_pb2 import Description
from hotbranch.v1.serve_pb2 import Rejection, Sampling, Submit
from router.fleet.holder import Holder
from router.fleet.link import Link
from router.fleet.member import Lost, M, Members
from router.generation import Ability, Prompt, Refused, Unavailable
from router.index.chains import KeyChains
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.route import LiveRoute, Rejected
from router.schedule.scheduler import Dispatch, FleetScheduler, Full, Late, Nowhere, Policy, Rules
from router.schedule.turn import R, Sent, Turn, Waiting

log = logging.getLogger(__name__)

ATTEMPTS = 3
CHUNK_TOKENS = 512  # of a replica that does not say
LONGEST_RETRY_S = 60
MOST = (1 << 31) - 1  # of a priority on the wire
RULES = Rules()
SHORTEST_S = 0.001  # until a deadline: 0 is none


class QueueingDispatcher(Generic[M]):
    """Implements `router.generation.Dispatcher` over the fleet and the index, where the fleet is of
    replicas.

    `weights` are those of the tenants; each model has a `policy` of its own. Whatever changes at a
    link moves what waits, at once.
    """

    def __init__(
        self,
        fleet: Members[M],
        index: Index,
        rules: Rules = RULES,
        weights: Mapping[str, float] = {},
        policy: Callable[[], Policy] = Hotbranch,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._rules = rules
        self._weights = weights
        self._policy = policy
        self._schedulers: dict[str, FleetScheduler] = {}  # by model
        self._links: dict[Holder, tuple[M, FleetScheduler]] = {}  # of those in a scheduler
        self._waiting: dict[int, Waiting[M, Any]] = {}  # by job
        self._ids = itertools.count(random.getrandbits(32))  # routers shall not draw alike
        self.chains = KeyChains()
        self.open_routes = 0
        self.retries = 0
        self.placements: Counter[str] = Counter()
        for link in fleet.links:
            self._changed(link)
        fleet.changed = self._changed

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._waiting)

    @property
    def queued_s(self) -> float:
        """Seconds of prefill that wait for their turn, on one replica after the other."""
        return sum(
            server.queue.tokens * server.prefill_s_per_token
            for scheduler in self._schedulers.values()
            for server in scheduler.servers.values()
        )

    @property
    def stolen(self) -> int:
        """Prompts that an idle replica took from another one's queue."""
        return sum(scheduler.stolen for scheduler in self._schedulers.values())

    async def open(
        self: "QueueingDispatcher[Link]", prompt: Prompt, samplings: Sequence[Sampling]
    ) -> LiveRoute:
        """Place one prompt; returns once the first delta is there. Raises Unavailable, Refused."""
        needs = self._needs(prompt)
        return await self.place(prompt, partial(_generate, prompt, samplings), needs=needs)

    async def place(
        self,
        prompt: Prompt,
        send: Callable[[Turn[M]], R],
        pool: str = "",
        tokens: int = 0,
        avoids: frozenset[str] = frozenset(),
        needs: frozenset[str] = frozenset(),
    ) -> R:
        """Wait for a prompt's turn and `send` it; returns once it has begun.

        A server that goes, drains or is full before the first token costs one attempt; the prompt
        is then placed on another. `pool` is the model by which servers are known, where that is
        not the prompt's own; `tokens` its size, where its token ids do not tell; those at the
        addresses in `avoids` cannot take it, nor those that do not offer what it `needs`. Raises
        Unavailable (from Lost where a server was lost), Refused.
        """
        arrived = _now()
        deadline = arrived + (prompt.deadline_s or inf)
        pool = pool or prompt.model
        tried = avoids
        problem = Unavailable(f"no replica is ready for {prompt.adapter or prompt.model!r}")
        cause: Exception | None = None
        for _ in range(ATTEMPTS):
            job = self._job(prompt, pool, tokens, arrived, deadline, tried, needs)
            try:
                sent = await self._turn(job, pool, prompt, send)
            except Nowhere:
                break
            if tried != avoids:
                self.retries += 1
                event(log, "retry", request_id=prompt.request_id, reason=str(problem))
            route, dispatch = sent.route, sent.turn.dispatch
            holder, keys = dispatch.server.holder, _keys(dispatch)
            try:
                await route.begun()
                sent.turn.began(route.cached_tokens)
                return route
            except Rejected as rejected:
                self._index.withdraw(holder, keys)
                if rejected.reason == Rejection.REASON_INVALID:
                    raise Refused(str(rejected)) from None
                full = rejected.reason in (
                    Rejection.REASON_OVERLOADED,
                    Rejection.REASON_DEADLINE,
                )
                problem, cause = Unavailable(str(rejected), overloaded=full), None
            except Lost as lost:
                self._index.withdraw(holder, keys)
                problem, cause = Unavailable(f"the replica was lost: {lost}"), lost
            except BaseException:
                if route.cached_tokens is None:
                    self._index.withdraw(holder, keys)
                route.cancel()
                raise
            tried |= {holder.replica}
        raise problem from cause

    def _needs(self, prompt: Prompt) -> frozenset[str]:
        """What a server has to offer. Raises Refused where none offers what is asked for."""
        adapter = frozenset([_adapter(prompt.adapter)] if prompt.adapter else [])
        scheduler = self._schedulers.get(prompt.model)
        if scheduler is None or not scheduler.servers or not (prompt.needs or prompt.wants):
            return adapter.union(prompt.needs)
        offered = adapter.union(*(server.offers for server in scheduler.servers.values()))
        for ability, field in prompt.needs.items():
            if ability not in offered:
                raise Refused(f"no replica of {prompt.model!r} can {ability}", field)
        return adapter.union(prompt.needs, prompt.wants & offered)

    def _job(
        self,
        prompt: Prompt,
        pool: str,
        tokens: int,
        arrived: float,
        deadline: float,
        tried: frozenset[str],
        needs: frozenset[str],
    ) -> Job:
        scheduler = self._schedulers.get(pool)
        sizes = {server.block_size for server in scheduler.servers.values()} if scheduler else set()
        seed = root(prompt.model, prompt.adapter, prompt.salt)
        id = next(self._ids)
        return Job(
            id=id,
            tokens=tokens or len(prompt.token_ids) // TOKEN_BYTES,
            keys={size: self.chains.keys(prompt.token_ids, size, seed) for size in sorted(sizes)},
            arrived=arrived,
            tenant=prompt.tenant,
            priority=prompt.priority,
            deadline=deadline,
            # what has nothing in common with others shall not meet them
            seed=seed if prompt.token_ids else id,
            session=prompt.session,
            avoids=tried,
            needs=needs,
        )

    async def _turn(
        self, job: Job, pool: str, prompt: Prompt, send: Callable[[Turn[M]], R]
    ) -> Sent[M, R]:
        """Wait until it is sent. Raises Nowhere, and Unavailable for too much that waits."""
        scheduler = self._schedulers.get(pool)
        if scheduler is None or not scheduler.servers:
            raise Nowhere
        waiting: Waiting[M, R] = Waiting(prompt, send, asyncio.get_running_loop().create_future())
        self._waiting[job.id] = waiting
        try:
            self._perform(scheduler, scheduler.arrive(job, _now()))
            async with asyncio.timeout(None if job.deadline == inf else job.deadline - _now()):
                return await waiting.sent
        except Full as full:
            seconds = min(LONGEST_RETRY_S, max(1, ceil(full.seconds)))
            raise Unavailable(str(full), seconds, overloaded=True) from None
        except Late:
            raise _too_late(prompt) from None
        except TimeoutError:
            self._give_up(scheduler, job, waiting)
            raise _too_late(prompt) from None
        except BaseException:
            self._give_up(scheduler, job, waiting)
            raise
        finally:
            del self._waiting[job.id]

    def _give_up(self, scheduler: FleetScheduler, job: Job, waiting: Waiting[M, Any]) -> None:
        """Nobody waits any more for a prompt that may have been sent in the same moment."""
        future = waiting.sent
        if future.done() and not future.cancelled() and not future.exception():
            sent, dispatch = future.result(), future.result().turn.dispatch
            self._index.withdraw(dispatch.server.holder, _keys(dispatch))
            sent.route.cancel()
        else:
            scheduler.cancel(job)

    def _perform(self, scheduler: FleetScheduler, dispatches: Sequence[Dispatch]) -> None:
        """Send what is to go out."""
        for dispatch in dispatches:
            job, server = dispatch.job, dispatch.server
            waiting = self._waiting[job.id]
            if waiting.sent.done():  # cancelled, and its task has not run since
                self._index.withdraw(server.holder, _keys(dispatch))
                scheduler.ended(job, server, _now())
                continue
            link, _ = self._links[server.holder]
            left = 0.0 if job.deadline == inf else max(SHORTEST_S, job.deadline - _now())
            turn = Turn(
                link,
                dispatch,
                left,
                partial(self._began, scheduler, dispatch),
                partial(self._closed, scheduler, dispatch),
            )
            self.open_routes += 1
            self.placements[dispatch.reason] += 1
            waiting.sent.set_result(Sent(turn, waiting.send(turn)))
            event(
                log,
                "placed",
                severity=logging.DEBUG,
                request_id=waiting.prompt.request_id,
                replica=link.replica_id,
                rank=server.holder.rank,
                tokens=job.tokens,
                matched=dispatch.matched * server.block_size,
                reason=dispatch.reason,
                waited_s=round(_now() - job.arrived, 6),
            )

    def _began(self, scheduler: FleetScheduler, dispatch: Dispatch, cached: int | None) -> None:
        """The replica has said what it held: less than believed is taken back."""
        blocks = (cached or 0) // dispatch.server.block_size
        believed = 0 if cached is None else dispatch.matched
        scheduler.began(dispatch.job, dispatch.server, believed, blocks, _now())
        self._perform(scheduler, scheduler.pump(dispatch.server, _now()))

    def _closed(self, scheduler: FleetScheduler, dispatch: Dispatch, generated: int) -> None:
        self.open_routes -= 1
        scheduler.ended(dispatch.job, dispatch.server, _now(), generated)
        self._perform(scheduler, scheduler.pump(dispatch.server, _now()))

    def _changed(self, link: M) -> None:
        """A link has come, gone, or reported."""
        now = _now()
        if not self._fleet.takes(link):
            for holder in [held for held, (other, _) in self._links.items() if other is link]:
                _, scheduler = self._links.pop(holder)
                lost, dispatches = scheduler.remove(holder, now)
                self._perform(scheduler, dispatches)
                for job in lost:
                    if (waiting := self._waiting.get(job.id)) and not waiting.sent.done():
                        waiting.sent.set_exception(Nowhere())
            return
        scheduler = self._join(link)
        for holder in link.holders:
            server = scheduler.servers[holder]
            if link.load:
                scheduler.reported(server, link.load, now, len(link.holders))
            self._perform(scheduler, scheduler.pump(server, now))

    def _join(self, link: M) -> FleetScheduler:
        """The scheduler of a link's model, with the link in it."""
        facts = link.description
        assert facts is not None, "a link that takes requests is described"
        scheduler = self._schedulers.get(facts.model)
        if scheduler is None:
            scheduler = FleetScheduler(self._index, self._policy(), self._rules, self._weights)
            self._schedulers[facts.model] = scheduler
        pool = facts.capacity_blocks * facts.block_size
        room = min(facts.max_context, pool or facts.max_context)
        chunk = facts.chunk_tokens or CHUNK_TOKENS
        for holder in link.holders:
            if holder not in scheduler.servers:
                scheduler.add(holder, facts.block_size, chunk, room, _offers(facts))
                self._links[holder] = link, scheduler
        return scheduler


def _now() -> float:
    return time.monotonic()


def _keys(dispatch: Dispatch) -> Sequence[int]:
    return dispatch.job.keys[dispatch.server.block_size]


def _adapter(name: str) -> str:
    """What a server offers that has this adapter."""
    return f"adapter {name}"


def _offers(facts: Description) -> frozenset[str]:
    abilities = {Ability.STRUCTURES: facts.structures, Ability.PARSES: facts.parses}
    able = [ability for ability, has in abilities.items() if has]
    return frozenset([*able, *map(_adapter, facts.adapters)])


def _too_late(prompt: Prompt) -> Unavailable:
    return Unavailable(f"it would not begin within {prompt.deadline_s:g} s", overloaded=True)


def _generate(prompt: Prompt, samplings: Sequence[Sampling], turn: Turn[Link]) -> LiveRoute:
    """Submit one prompt for len(samplings) choices."""
    dispatch = turn.dispatch
    matched = dispatch.matched * dispatch.server.block_size
    route = LiveRoute(turn.link, len(samplings), matched, turn.closed)
    submits = [_submit(prompt, one, dispatch, turn.left_s) for one in samplings]
    route.tickets = turn.link.submit(submits, route, dispatch.job.tokens - matched)
    return route


def _submit(prompt: Prompt, sampling: Sampling, dispatch: Dispatch, deadline_s: float) -> Submit:
    return Submit(
        request_id=prompt.request_id,
        model=prompt.model,
        adapter=prompt.adapter,
        salt=prompt.salt,
        token_ids=prompt.token_ids,
        sampling=sampling,
        priority=max(-MOST, min(MOST, dispatch.rank)),
        deadline_s=deadline_s,
        predicted_tokens=dispatch.matched * dispatch.server.block_size,
        rank=dispatch.server.holder.rank,
        chat=prompt.chat if Ability.PARSES in dispatch.server.offers else "",
    )
