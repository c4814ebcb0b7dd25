"""A load on replicas that run, through the router as it runs, without its HTTP front."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fleet.processes import NotStarted, Replicas
from bench.fleet.traces import Arrival
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, Sampling
from router.fleet.discovery import StaticDiscovery
from router.fleet.fleet import Fleet
from router.fleet.link import Link
from router.generation import Prompt, Refused, Unavailable
from router.index.index import Index
from router.index.view import View
from router.schedule.dispatch import QueueingDispatcher
from router.schedule.scheduler import Rules

START_S = 120.0  # for all replicas to serve
POLL_S = 0.1
TOLD_S = 5.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from a request's time to its first token; tokens of its prompt, and those of them
    that the cache had."""

    ttft: float
    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class Lived:
    """`answers` in order of arrival, None for what failed. `names` of the replicas in the router's
    order. `busy` is the share of a core that the router and the sending took."""

    answers: Sequence[Answer | None]
    reasons: Counter[str]
    names: Sequence[str]
    busy: float


async def play(
    replicas: Replicas, model: str, fingerprint: str, rules: Rules, arrivals: Sequence[Arrival]
) -> Lived:
    """Send requests at their times, to their ends. Raises NotStarted."""
    index, recoveries = Index(), Counter[str]()
    fleet = Fleet(
        StaticDiscovery(replicas.addresses),
        {model: fingerprint},
        lambda address: View(index, address, recoveries),
        drain_s=0.0,
    )
    await fleet.start()
    try:
        await _ready(fleet, model, replicas)
        names = [link.address for link in fleet.links]
        dispatcher = QueueingDispatcher(fleet, index, rules)
        began, own = time.monotonic(), time.process_time()
        answers = await _send(dispatcher, model, arrivals)
        busy = (time.process_time() - own) / (time.monotonic() - began)
    finally:
        await fleet.stop()
    return Lived(answers, dispatcher.placements, names, busy)


async def _ready(fleet: Fleet, model: str, replicas: Replicas) -> None:
    wanted, deadline = len(replicas.addresses), time.monotonic() + START_S
    while (ready := len(fleet.ready(model))) < wanted:
        if time.monotonic() > deadline or not replicas.alive():
            raise NotStarted(f"{ready} of {wanted} replicas started")
        await asyncio.sleep(POLL_S)
    _say(f"{wanted} replicas run")


async def _send(
    dispatcher: QueueingDispatcher[Link], model: str, arrivals: Sequence[Arrival]
) -> list[Answer | None]:
    start = told = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        asked = []
        for number, arrival in enumerate(arrivals, 1):
            due = start + arrival.at
            await asyncio.sleep(due - time.monotonic())
            asked.append(tasks.create_task(_ask(dispatcher, model, number, arrival, due)))
            if time.monotonic() - told > TOLD_S or number == len(arrivals):
                told = time.monotonic()
                _say(f"{number} of {len(arrivals)} sent, {dispatcher.open_routes} run")
    return [one.result() for one in asked]


async def _ask(
    dispatcher: QueueingDispatcher[Link], model: str, number: int, arrival: Arrival, due: float
) -> Answer | None:
    """One request to its last token; None when it failed."""
    prompt = Prompt(model, arrival.prompt, arrival.tenant, f"{number}", session=arrival.session)
    sampling = Sampling(max_tokens=arrival.output, ignore_eos=True)
    try:
        route = await dispatcher.open(prompt, [sampling])
    except (Unavailable, Refused) as error:
        _say(f"request {number}: {error}")
        return None
    ttft, finish = time.monotonic() - due, 0
    async for step in route.deltas():
        finish = step[-1][1].finish
    if finish != FINISH_REASON_LENGTH:
        _say(f"request {number} ended before it was done")
        return None
    return Answer(ttft, arrival.tokens, route.cached_tokens or 0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
