"""The index over real connections: who is who, restarts, silence, misses and bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from gated_replica import MODEL
from test_fleet import (
    Replica,
    Setup,
    eventually,
    held,
    prompt,
    router,
    setup,
    start_replica,
    stop_replica,
)
from test_router_metrics import metrics_of, samples
from told_replica import told_fleet

from hotbranch.keys import block_keys, root
from hotbranch.v1.cache_pb2 import WatchRequest
from replicas.service import Context, Service
from router.fleet.holder import Holder
from router.fleet.link import State
from router.generation import Prompt
from router.index.index import Index
from router.index.view import View


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, replicas say nothing about their caches."""
    begin, watch = asyncio.Event(), Service.WatchCache

    async def watch_cache(self: Service, request: WatchRequest, context: Context) -> None:
        await begin.wait()
        await watch(self, request, context)

    monkeypatch.setattr(Service, "WatchCache", watch_cache)
    return begin


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that do not know WatchCache."""

    async def watch_cache(self: Service, request: WatchRequest, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such thing here")

    monkeypatch.setattr(Service, "WatchCache", watch_cache)


def path(prompt: Prompt, size: int = 4) -> list[int]:
    return block_keys(prompt.token_ids, size, root(MODEL))


def view(fleet: Setup, replica: Replica) -> View:
    watcher = fleet.link(replica).watcher
    assert isinstance(watcher, View)
    return watcher


async def test_field_report_11_identity_is_the_connection_not_what_it_says() -> None:
    async with told_fleet(name="twin") as (fleet, told):
        prompts = [prompt(1), prompt(2)]
        for replica, asked in zip(told, prompts, strict=True):
            holder, keys = Holder(replica.address), {*path(asked)}
            replica.report(path(asked))
            await eventually(lambda h=holder, k=keys: fleet.index.held(h) == k)  # type: ignore[misc]
        assert {link.replica_id for link in fleet.fleet.links} == {"twin"}
        assert {link.description.epoch for link in fleet.fleet.links if link.description} == {7}
        for _ in range(3):
            for asked in prompts:
                assert (await fleet.generate(asked)).predicted_tokens == 40
        for replica, asked in zip(told, prompts, strict=True):
            assert [sent.token_ids for sent in replica.submits] == [asked.token_ids] * 3


async def test_field_report_14_a_replica_serves_before_its_snapshot(reports: asyncio.Event) -> None:
    # what meets after a prediction has ended is brought together by history
    async with setup(index=Index(prediction_s=1e-3)) as fleet:
        homes = {seed: await fleet.generate(prompt(seed), max_tokens=9) for seed in range(6)}
        for seed, home in homes.items():
            route = await fleet.generate(prompt(seed, tail=1))
            assert route.replica_id == home.replica_id
            assert route.predicted_tokens == route.cached_tokens == 40
        for replica in fleet.replicas:
            assert not view(fleet, replica).current
            assert fleet.index.held(Holder(replica.address)) < held(replica), "not the answers"
        reports.set()
        for replica in fleet.replicas:
            await eventually(lambda r=replica: view(fleet, r).current)  # type: ignore[misc]
        await fleet.settled()
        assert (await fleet.generate(prompt(3, tail=2))).replica_id == homes[3].replica_id
        assert not fleet.recoveries


PREFIXES = 60


@asynccontextmanager
async def spread_out() -> AsyncIterator[tuple[list[Replica], dict[int, str]]]:
    """Three replicas, and where each prefix is: where no hash would have put it."""
    replicas = [await start_replica(kv_tokens=16384) for _ in range(3)]
    homes: dict[int, str] = {}
    try:
        for i, replica in enumerate(replicas):
            async with router([replica]) as alone:
                for seed in range(i, PREFIXES, 3):
                    homes[seed] = (await alone.generate(prompt(seed, tokens=200))).replica_id
        yield replicas, homes
    finally:
        for replica in replicas:
            await stop_replica(replica)


def at_home(placed: dict[int, str], homes: dict[int, str]) -> float:
    return sum(placed[seed] == home for seed, home in homes.items()) / len(homes)


async def placements(fleet: Setup, tail: int) -> dict[int, str]:
    return {
        seed: (await fleet.generate(prompt(seed, tokens=200, tail=tail))).replica_id
        for seed in range(PREFIXES)
    }


async def test_field_report_15_a_restarted_router_places_prefixes_where_they_were() -> None:
    async with spread_out() as (replicas, homes):
        for start in (1, 2):
            async with router(replicas) as fleet:
                await fleet.settled()
                assert at_home(await placements(fleet, tail=start), homes) >= 0.95


async def test_field_report_16_two_routers_know_the_same_and_decide_the_same() -> None:
    async with spread_out() as (replicas, homes), router(replicas) as one, router(replicas) as two:
        for fleet in (one, two):
            await fleet.settled()
        assert at_home(await placements(one, tail=1), homes) >= 0.95
        assert at_home(await placements(two, tail=2), homes) >= 0.95
        for fleet in (one, two):
            await fleet.settled()
        for replica in replicas:
            known = one.index.held(Holder(replica.address))
            assert known == two.index.held(Holder(replica.address)) == held(replica)
            assert known


@pytest.mark.usefixtures("unreported")
async def test_a_replica_without_reports_is_routed_by_its_history() -> None:
    async with setup(index=Index(prediction_s=1e-3), kv_tokens=256) as fleet:
        links = {replica.address: fleet.link(replica) for replica in fleet.replicas}
        reached = {address: link.description for address, link in links.items()}
        for first in range(0, 24, 4):
            homes = {seed: await fleet.generate(prompt(seed)) for seed in range(first, first + 4)}
            for seed, home in homes.items():
                route = await fleet.generate(prompt(seed, tail=1))
                assert route.replica_id == home.replica_id
                assert route.predicted_tokens == route.cached_tokens == 40
        assert any(replica.engine.load().evicted_blocks for replica in fleet.replicas)
        counts = [fleet.index.held_count(Holder(address)) for address in links]
        assert all(0 < count <= 256 // 4 for count in counts)
        for address, link in links.items():
            assert link.state is State.READY
            assert link.description is reached[address], "it was described once"
            assert not link.watcher.recoveries


async def test_a_settled_miss_takes_the_belief_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.index.index.COMPUTED_S", 600.0)  # so that only the miss does it
    async with setup() as fleet:
        metrics = metrics_of(fleet)
        home = fleet.of(await fleet.generate(prompt(1)))
        await flushed(fleet, home)
        assert fleet.index.predicted_blocks == 11
        route = await fleet.generate(prompt(1, tail=1))
        metrics.count_prompt("t", MODEL, route.replica_id, 44, 40, route.cached_tokens)
        assert (route.predicted_tokens, route.cached_tokens) == (40, 0)
        assert fleet.index.predicted_blocks == 0
        await flushed(fleet, home)
        assert (await fleet.generate(prompt(1, tail=2))).predicted_tokens == 0
        counted = samples(metrics)
        name = "hotbranch_overpredicted_tokens_total"
        assert counted[name, MODEL, home.address, "t"] == 40


async def flushed(fleet: Setup, replica: Replica) -> None:
    """The engine's cache is emptied, not by a router, and the router has heard of it."""
    await fleet.settled()
    replica.engine.flush().result()
    await fleet.settled()
    assert not fleet.index.held(Holder(replica.address))


async def test_beyond_index_blocks_the_router_goes_on_with_what_is_hot() -> None:
    async with setup(index=Index(limit=60), kv_tokens=4096) as fleet:
        metrics = metrics_of(fleet)
        for seed in range(30):
            hot = await fleet.generate(prompt(99, tail=seed))
            await fleet.generate(prompt(seed))
            assert fleet.index.blocks + fleet.index.predicted_blocks <= 60
        stored = sum(replica.engine.load().cached_blocks for replica in fleet.replicas)
        counted = samples(metrics)
        assert stored > 300
        assert counted["hotbranch_index_forgotten_blocks_total",] > 100
        assert counted["hotbranch_index_blocks",] <= 60
        assert counted["hotbranch_replicas", "ready"] == 2
        again = await fleet.generate(prompt(99, tail=31))
        assert (again.replica_id, again.predicted_tokens) == (hot.replica_id, 40)
