"""Links, index and dispatch over real gRPC to real replicas, whose model is a ledger."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from gated_replica import MODEL, VOCABULARY, GatedRunner, Letters

from hotbranch.settings import ReplicaSettings
from hotbranch.v1.serve_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, Sampling
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.server import ReplicaServer
from router.fleet.fleet import Fleet
from router.fleet.holder import Holder
from router.fleet.link import Link, State
from router.generation import Prompt, Refused, Unavailable
from router.index.index import Index
from router.index.view import View
from router.schedule.dispatch import QueueingDispatcher
from router.schedule.route import LiveRoute

BLOCK = 4
PATIENCE_S = 20.0


@dataclass
class Replica:
    server: ReplicaServer
    engine: RadixEngine
    runner: GatedRunner

    @property
    def address(self) -> str:
        return self.server.address


async def start_replica(
    port: int = 0,
    fingerprint: str = "ours",
    kv_tokens: int = 2048,
    name: str = "",
    model: str = MODEL,
    block_size: int = BLOCK,
    vocabulary: int = VOCABULARY,
    engine_type: type[RadixEngine] = RadixEngine,
) -> Replica:
    settings = ReplicaSettings(
        block_size=block_size, kv_tokens=kv_tokens, grpc_port=port, replica_id=name
    )
    runner = GatedRunner(kv_tokens // block_size, block_size)
    limits = Limits.of(settings, max_context=1024)
    engine = engine_type(limits, runner, frozenset(), lambda request: Letters(1), vocabulary)
    server = ReplicaServer(settings)
    await server.start()
    await server.load(lambda: (engine, model, fingerprint))
    return Replica(server, engine, runner)


async def stop_replica(replica: Replica) -> None:
    replica.runner.gate.set()
    await replica.server.stop(0)


class ListedDiscovery:
    """Addresses that a test changes."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = frozenset(addresses)
        self._changed = asyncio.Event()

    def set(self, *addresses: str) -> None:
        self._addresses = frozenset(addresses)
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield self._addresses
            await self._changed.wait()
            self._changed.clear()


@dataclass
class Setup:
    """A router without its HTTP front, and the replicas it knows."""

    replicas: list[Replica]
    discovery: ListedDiscovery
    fleet: Fleet
    index: Index
    dispatcher: QueueingDispatcher
    recoveries: Counter[str]

    def link(self, replica: Replica) -> Link:
        return next(link for link in self.fleet.links if link.address == replica.address)

    def of(self, route: LiveRoute) -> Replica:
        """The replica that a route goes to."""
        return next(r for r in self.replicas if r.address == route.replica_id)

    async def generate(self, prompt: Prompt, max_tokens: int = 3) -> LiveRoute:
        """Run one request to its end."""
        route = await self.dispatcher.open(prompt, [Sampling(max_tokens=max_tokens)])
        assert await finishes(route) == [FINISH_REASON_LENGTH]
        return route

    async def settled(self) -> None:
        """Wait until the router knows what its replicas hold, and how many requests they run."""
        for replica in self.replicas:
            await eventually(lambda r=replica: self._knows(r))  # type: ignore[misc]

    def _knows(self, replica: Replica) -> bool:
        told, load = self.link(replica).load, replica.engine.load()
        known = self.index.held(Holder(replica.address)) == held(replica)
        return known and told is not None and told.running == load.running


@asynccontextmanager
async def router(replicas: list[Replica], index: Index | None = None) -> AsyncIterator[Setup]:
    """A router over replicas that are somebody else's, once it has reached them."""
    index, recoveries = Index() if index is None else index, Counter[str]()
    discovery = ListedDiscovery(*(replica.address for replica in replicas))
    fleet = Fleet(discovery, {MODEL: "ours"}, lambda a: View(index, a, recoveries), drain_s=5)
    await fleet.start()
    try:
        await eventually(lambda: len(fleet.ready(MODEL)) == len(replicas))
        dispatcher = QueueingDispatcher(fleet, index)
        yield Setup(replicas, discovery, fleet, index, dispatcher, recoveries)
    finally:
        await fleet.stop()


@asynccontextmanager
async def setup(
    replicas: int = 2, index: Index | None = None, **options: Any
) -> AsyncIterator[Setup]:
    started = [await start_replica(**options) for _ in range(replicas)]
    try:
        async with router(started, index) as fleet:
            yield fleet
    finally:
        for replica in started:
            await stop_replica(replica)


def held(replica: Replica) -> set[int]:
    """What the replica's tree holds, asked of the engine itself."""
    answer: list[set[int]] = []
    replica.engine.snapshot(lambda runs: answer.append({key for run in runs for key in run.keys}))
    deadline = time.monotonic() + PATIENCE_S
    while not answer and time.monotonic() < deadline:
        time.sleep(0.001)
    return answer[0]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def finishes(route: LiveRoute) -> list[int]:
    ends: list[int] = []
    async for step in route.deltas():
        ends += [delta.finish for _, delta in step if delta.finish]
    return ends


def prompt(seed: int, tokens: int = 40, tail: int = 0, **fields: Any) -> Prompt:
    """`tokens` shared by all of a seed, then four of its own for each `tail`."""
    ids = [(seed * 31 + i) % VOCABULARY for i in range(tokens)] + [tail] * 4
    encoded = b"".join(token.to_bytes(4, "little") for token in ids)
    return Prompt(**{"model": MODEL, "tenant": "t", "request_id": "r", **fields}, token_ids=encoded)


async def test_a_repeated_prefix_meets_its_replica_and_the_prediction_is_right() -> None:
    async with setup() as fleet:
        homes = {}
        for seed in range(6):
            homes[seed] = (await fleet.generate(prompt(seed))).replica_id
        await fleet.settled()
        for seed in range(6):
            route = await fleet.generate(prompt(seed, tail=1))
            assert route.replica_id == homes[seed]
            assert route.predicted_tokens == route.cached_tokens == 40


async def test_siblings_in_a_burst_follow_before_any_report() -> None:
    async with setup() as fleet:
        for replica in fleet.replicas:
            replica.runner.gate.clear()  # no step ends, so nothing is reported
        opening = [
            asyncio.create_task(fleet.dispatcher.open(prompt(1, tail=i), [Sampling(max_tokens=1)]))
            for i in range(5)
        ]
        await eventually(lambda: fleet.dispatcher.open_routes == 5)
        for replica in fleet.replicas:
            replica.runner.gate.set()
        routes = await asyncio.gather(*opening)
        assert len({route.replica_id for route in routes}) == 1
        assert sorted(route.predicted_tokens for route in routes) == [0, 40, 40, 40, 40]
        assert sorted(route.cached_tokens or 0 for route in routes) == [0, 40, 40, 40, 40]


async def test_the_index_equals_the_trees_after_evictions() -> None:
    async with setup(kv_tokens=256) as fleet:
        for seed in range(80):
            await fleet.generate(prompt(seed))
        await fleet.settled()
        assert all(replica.engine.load().evicted_blocks for replica in fleet.replicas)


async def test_choices_of_one_prompt_share_a_route() -> None:
    async with setup() as fleet:
        route = await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=2)] * 3)
        assert sorted(await finishes(route)) == [FINISH_REASON_LENGTH] * 3
        assert fleet.dispatcher.open_routes == 0


async def test_a_replica_lost_before_the_first_token_costs_a_retry() -> None:
    async with setup() as fleet:
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        opening = asyncio.create_task(fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=2)]))
        await eventually(lambda: any(link.in_flight for link in fleet.fleet.links))
        victim = next(r for r in fleet.replicas if fleet.link(r).in_flight)
        other = next(r for r in fleet.replicas if r is not victim)
        other.runner.gate.set()
        victim.runner.broken = True
        await stop_replica(victim)
        route = await opening
        assert route.replica_id == other.address
        assert await finishes(route) == [FINISH_REASON_LENGTH]
        assert fleet.dispatcher.retries == 1


async def test_a_replica_lost_after_the_first_token_ends_the_request_with_an_error() -> None:
    async with setup() as fleet:
        for replica in fleet.replicas:
            replica.runner.pace_s = 0.05  # 500 tokens take longer than the stop
        route = await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=500)])
        stopping = asyncio.create_task(fleet.of(route).server.stop(0))
        ends = await finishes(route)
        await stopping
        assert ends == [FINISH_REASON_ERROR]
        assert fleet.dispatcher.open_routes == 0


async def test_when_every_replica_is_gone_the_request_is_unavailable() -> None:
    async with setup(replicas=1) as fleet:
        await stop_replica(fleet.replicas[0])
        await eventually(lambda: fleet.fleet.links[0].state is State.CONNECTING)
        with pytest.raises(Unavailable):
            await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=1)])


async def test_an_unknown_model_is_unavailable_and_an_impossible_prompt_refused() -> None:
    async with setup(replicas=1) as fleet:
        with pytest.raises(Unavailable, match="other"):
            await fleet.dispatcher.open(prompt(1, model="other"), [Sampling(max_tokens=1)])
        with pytest.raises(Refused):
            await fleet.dispatcher.open(prompt(1, tokens=5000), [Sampling(max_tokens=1)])
        assert fleet.dispatcher.open_routes == 0


async def test_cancel_reaches_the_engine_and_load_returns_to_zero() -> None:
    async with setup() as fleet:
        routes = [
            await fleet.dispatcher.open(prompt(seed), [Sampling(max_tokens=900)])
            for seed in range(8)
        ]
        for route in routes:
            route.cancel()
        for replica in fleet.replicas:
            await eventually(lambda r=replica: r.engine.load().running == 0)  # type: ignore[misc]
        assert fleet.dispatcher.open_routes == 0
        for link in fleet.fleet.links:
            assert link.in_flight == 0
            await eventually(lambda k=link: k.outstanding.tokens == 0)  # type: ignore[misc]


async def test_leaving_the_deltas_early_cancels() -> None:
    async with setup(replicas=1) as fleet:
        route = await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=900)])
        deltas = route.deltas()
        await anext(deltas)
        await deltas.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: fleet.replicas[0].engine.load().running == 0)
        assert fleet.dispatcher.open_routes == 0


async def test_cancelling_an_open_that_waits_cancels_in_the_engine() -> None:
    async with setup(replicas=1) as fleet:
        runner = fleet.replicas[0].runner
        runner.gate.clear()
        opening = asyncio.create_task(fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=900)]))
        await eventually(lambda: fleet.fleet.links[0].in_flight == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        runner.gate.set()
        await eventually(lambda: fleet.replicas[0].engine.load().waiting == 0)
        await eventually(lambda: fleet.replicas[0].engine.load().running == 0)
        assert fleet.dispatcher.open_routes == 0
        assert fleet.index.predicted_blocks == 0


async def test_a_draining_replica_gets_nothing_new() -> None:
    async with setup() as fleet:
        first = await fleet.generate(prompt(1))
        home = fleet.of(first)
        await home.server.drain(0)
        await eventually(lambda: fleet.link(home).state is State.DRAINING)
        assert (await fleet.generate(prompt(1, tail=1))).replica_id != first.replica_id


async def test_a_replica_restarted_at_its_address_is_purged_and_serves_again() -> None:
    async with setup(replicas=1) as fleet:
        await fleet.generate(prompt(1))
        await fleet.settled()
        old = fleet.replicas[0]
        port = int(old.address.rpartition(":")[2])
        epoch = fleet.fleet.links[0].description
        await stop_replica(old)
        fleet.replicas[0] = await start_replica(port)
        await eventually(
            lambda: (
                fleet.fleet.links[0].state is State.READY
                and fleet.fleet.links[0].description != epoch
            )
        )
        await eventually(lambda: fleet.index.blocks == 0)
        assert (await fleet.generate(prompt(1, tail=1))).cached_tokens == 0


async def test_a_replica_that_discovery_drops_finishes_what_it_has() -> None:
    async with setup() as fleet:
        route = await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=200)])
        leaving = fleet.of(route)
        fleet.discovery.set(*(r.address for r in fleet.replicas if r is not leaving))
        await eventually(lambda: len(fleet.fleet.links) == 1)
        assert await finishes(route) == [FINISH_REASON_LENGTH]
        await eventually(lambda: not fleet.index.held(Holder(leaving.address)))


async def test_a_replica_with_another_tokenizer_is_refused_with_its_reason() -> None:
    stranger = await start_replica(fingerprint="theirs")
    fleet = Fleet(
        ListedDiscovery(stranger.address),
        {MODEL: "ours"},
        lambda a: View(Index(), a, Counter()),
        drain_s=1,
    )
    await fleet.start()
    try:
        await eventually(lambda: bool(fleet.links) and fleet.links[0].state is State.REFUSED)
        assert "tokenizer" in fleet.links[0].problem
        assert fleet.ready(MODEL) == []
    finally:
        await fleet.stop()
        await stop_replica(stranger)


async def test_a_request_goes_only_to_replicas_that_serve_its_model() -> None:
    replicas = [await start_replica(model=model) for model in (MODEL, "other")]
    index = Index()
    fleet = Fleet(
        ListedDiscovery(*(replica.address for replica in replicas)),
        {MODEL: "ours", "other": "ours"},
        lambda a: View(index, a, Counter()),
        drain_s=1,
    )
    await fleet.start()
    try:
        await eventually(lambda: bool(fleet.ready(MODEL) and fleet.ready("other")))
        dispatcher = QueueingDispatcher(fleet, index)
        for _ in range(3):
            for replica, model in zip(replicas, (MODEL, "other"), strict=True):
                route = await dispatcher.open(prompt(1, model=model), [Sampling(max_tokens=1)])
                assert route.replica_id == replica.address
                assert await finishes(route) == [FINISH_REASON_LENGTH]
    finally:
        await fleet.stop()
        for replica in replicas:
            await stop_replica(replica)
