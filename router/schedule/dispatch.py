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
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import NamedTuple

from hotbranch.keys import TOKEN_BYTES, root
from hotbranch.log import event
from hotbranch.v1.replica_pb2 import Description
from hotbranch.v1.serve_pb2 import Rejection, Sampling, Submit
from router.fleet.fleet import Fleet
from router.fleet.holder import Holder
from router.fleet.link import Link
from router.generation import Ability, Prompt, Refused, Unavailable
from router.index.chains import KeyChains
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.route import LiveRoute, Lost, Rejected
from router.schedule.scheduler import Dispatch, FleetScheduler, Full, Late, Nowhere, Policy, Rules

log = logging.getLogger(__name__)

ATTEMPTS = 3
CHUNK_TOKENS = 512  # of a replica that does not say
LONGEST_RETRY_S = 60
MOST = (1 << 31) - 1  # of a priority on the wire
RULES = Rules()
SHORTEST_S = 0.001  # until a deadline: 0 is none


class Sent(NamedTuple):
    """A prompt that is on its way to a replica."""

    scheduler: FleetScheduler
    dispatch: Dispatch
    route: LiveRoute


@dataclass(slots=True, eq=False)
class _Waiting:
    """A prompt that waits for its turn."""

    prompt: Prompt
    samplings: Sequence[Sampling]
    turn: "asyncio.Future[Sent]"


class QueueingDispatcher:
    """Implements `router.generation.Dispatcher` over the fleet and the index.

    `weights` are those of the tenants; each model has a `policy` of its own. Whatever changes at a
    link moves what waits, at once.
    """

    def __init__(
        self,
        fleet: Fleet,
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
        self._links: dict[Holder, tuple[Link, FleetScheduler]] = {}  # of those in a scheduler
        self._waiting: dict[int, _Waiting] = {}  # by job
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

    async def open(self, prompt: Prompt, samplings: Sequence[Sampling]) -> LiveRoute:
        """Place one prompt; returns once the first delta is there. Raises Unavailable, Refused.

        A replica that goes, drains or is full before the first token costs one attempt; the prompt
        is then placed on another.
        """
        arrived = _now()
        deadline = arrived + (prompt.deadline_s or inf)
        tried: frozenset[str] = frozenset()
        needs = self._needs(prompt)
        problem = Unavailable(f"no replica is ready for {prompt.adapter or prompt.model!r}")
        for _ in range(ATTEMPTS):
            job = self._job(prompt, arrived, deadline, tried, needs)
            try:
                sent = await self._turn(job, prompt, samplings)
            except Nowhere:
                break
            if tried:
                self.retries += 1
                event(log, "retry", request_id=prompt.request_id, reason=str(problem))
            route, holder = sent.route, sent.dispatch.server.holder
            keys = _keys(sent.dispatch)
            try:
                await route.begun()
                self._began(sent)
                return route
            except Rejected as rejected:
                self._index.withdraw(holder, keys)
                if rejected.reason == Rejection.REASON_INVALID:
                    raise Refused(str(rejected)) from None
                full = rejected.reason in (
                    Rejection.REASON_OVERLOADED,
                    Rejection.REASON_DEADLINE,
                )
                problem = Unavailable(str(rejected), overloaded=full)
            except Lost as lost:
                self._index.withdraw(holder, keys)
                problem = Unavailable(f"the replica was lost: {lost}")
            except BaseException:
                if route.cached_tokens is None:
                    self._index.withdraw(holder, keys)
                route.cancel()
                raise
            tried |= {holder.replica}
        raise problem

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
        arrived: float,
        deadline: float,
        tried: frozenset[str],
        needs: frozenset[str],
    ) -> Job:
        scheduler = self._schedulers.get(prompt.model)
        sizes = {server.block_size for server in scheduler.servers.values()} if scheduler else set()
        seed = root(prompt.model, prompt.adapter, prompt.salt)
        return Job(
            id=next(self._ids),
            tokens=len(prompt.token_ids) // TOKEN_BYTES,
            keys={size: self.chains.keys(prompt.token_ids, size, seed) for size in sorted(sizes)},
            arrived=arrived,
            tenant=prompt.tenant,
            priority=prompt.priority,
            deadline=deadline,
            seed=seed,
            session=prompt.session,
            avoids=tried,
            needs=needs,
        )

    async def _turn(self, job: Job, prompt: Prompt, samplings: Sequence[Sampling]) -> Sent:
        """Wait until it is sent. Raises Nowhere, and Unavailable for too much that waits."""
        scheduler = self._schedulers.get(prompt.model)
        if scheduler is None or not scheduler.servers:
            raise Nowhere
        waiting = _Waiting(prompt, samplings, asyncio.get_running_loop().create_future())
        self._waiting[job.id] = waiting
        try:
            self._perform(scheduler, scheduler.arrive(job, _now()))
            async with asyncio.timeout(None if job.deadline == inf else job.deadline - _now()):
                return await waiting.turn
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

    def _give_up(self, scheduler: FleetScheduler, job: Job, waiting: _Waiting) -> None:
        """Nobody waits any more for a prompt that may have been sent in the same moment."""
        turn = waiting.turn
        if turn.done() and not turn.cancelled() and not turn.exception():
            sent = turn.result()
            self._index.withdraw(sent.dispatch.server.holder, _keys(sent.dispatch))
            sent.route.cancel()
        else:
            scheduler.cancel(job)

    def _perform(self, scheduler: FleetScheduler, dispatches: Sequence[Dispatch]) -> None:
        """Send what is to go out."""
        for dispatch in dispatches:
            job, server = dispatch.job, dispatch.server
            waiting = self._waiting[job.id]
            if waiting.turn.done():  # cancelled, and its task has not run since
                self._index.withdraw(server.holder, _keys(dispatch))
                scheduler.ended(job, server, _now())
                continue
            link, _ = self._links[server.holder]
            matched = dispatch.matched * server.block_size
            prompt, samplings = waiting.prompt, waiting.samplings
            left = 0.0 if job.deadline == inf else max(SHORTEST_S, job.deadline - _now())
            closed = partial(self._closed, scheduler, dispatch)
            route = LiveRoute(link, len(samplings), matched, closed)
            submits = [_submit(prompt, one, dispatch, left) for one in samplings]
            route.tickets = link.submit(submits, route, job.tokens - matched)
            self.open_routes += 1
            self.placements[dispatch.reason] += 1
            waiting.turn.set_result(Sent(scheduler, dispatch, route))
            event(
                log,
                "placed",
                severity=logging.DEBUG,
                request_id=prompt.request_id,
                replica=link.replica_id,
                rank=server.holder.rank,
                tokens=job.tokens,
                matched=matched,
                reason=dispatch.reason,
                waited_s=round(_now() - job.arrived, 6),
            )

    def _began(self, sent: Sent) -> None:
        """The replica has said what it held: less than believed is taken back."""
        scheduler, dispatch, cached = sent.scheduler, sent.dispatch, sent.route.cached_tokens
        blocks = (cached or 0) // dispatch.server.block_size
        believed = 0 if cached is None else dispatch.matched
        scheduler.began(dispatch.job, dispatch.server, believed, blocks, _now())
        self._perform(scheduler, scheduler.pump(dispatch.server, _now()))

    def _closed(self, scheduler: FleetScheduler, dispatch: Dispatch, generated: int) -> None:
        self.open_routes -= 1
        scheduler.ended(dispatch.job, dispatch.server, _now(), generated)
        self._perform(scheduler, scheduler.pump(dispatch.server, _now()))

    def _changed(self, link: Link) -> None:
        """A link has come, gone, or reported."""
        now = _now()
        if not self._fleet.takes(link):
            for holder in [held for held, (other, _) in self._links.items() if other is link]:
                _, scheduler = self._links.pop(holder)
                lost, dispatches = scheduler.remove(holder, now)
                self._perform(scheduler, dispatches)
                for job in lost:
                    if (waiting := self._waiting.get(job.id)) and not waiting.turn.done():
                        waiting.turn.set_exception(Nowhere())
            return
        scheduler = self._join(link)
        for holder in link.holders:
            server = scheduler.servers[holder]
            if link.load:
                scheduler.reported(server, link.load, now, len(link.holders))
            self._perform(scheduler, scheduler.pump(server, now))

    def _join(self, link: Link) -> FleetScheduler:
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
