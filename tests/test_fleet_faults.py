"""Links and fleet when something goes wrong that no protocol foresees."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from gated_replica import MODEL
from test_fleet import (
    ListedDiscovery,
    eventually,
    finishes,
    prompt,
    setup,
    start_replica,
    stop_replica,
)
from test_replica_main import ROOT, process

from hotbranch.v1.cache_pb2 import CacheUpdate
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, Sampling
from router.fleet import link as link_module
from router.fleet import watch as watch_module
from router.fleet.fleet import Fleet
from router.fleet.holder import Holder
from router.fleet.link import State
from router.fleet.watch import Disconnected
from router.generation import Refused, Unavailable
from router.index.index import Index
from router.index.view import View
from router.schedule.dispatch import QueueingDispatcher


class FailingView(View):
    """A view that runs `fail` in place of its first update."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__(Index(), "any", Counter())
        self.fail = fail
        self.failed = False

    def apply(self, update: CacheUpdate, now: float) -> None:
        if not self.failed:
            self.failed = True
            self.fail()
        super().apply(update, now)


async def test_a_link_outlives_an_error_that_nobody_foresaw() -> None:
    def fail() -> None:
        raise KeyError("a defect")

    view = FailingView(fail)
    replica = await start_replica()
    index = Index()
    fleet = Fleet(ListedDiscovery(replica.address), {MODEL: "ours"}, lambda a: view, drain_s=1)
    await fleet.start()
    try:
        await eventually(lambda: view.current)
        await eventually(lambda: fleet.links[0].state is State.READY)
        dispatcher = QueueingDispatcher(fleet, index)
        index.add(Holder(replica.address))
        route = await dispatcher.open(prompt(1), [Sampling(max_tokens=2)])
        assert await finishes(route) == [FINISH_REASON_LENGTH]
    finally:
        await fleet.stop()
        await stop_replica(replica)


async def test_a_link_closes_though_its_replica_goes_in_the_same_moment() -> None:
    closing: list[asyncio.Task[None]] = []

    def fail() -> None:
        closing.append(asyncio.create_task(fleet.links[0].close()))
        raise Disconnected("gone")

    replica = await start_replica()
    fleet = Fleet(
        ListedDiscovery(replica.address), {MODEL: "ours"}, lambda a: FailingView(fail), drain_s=1
    )
    await fleet.start()
    try:
        await eventually(lambda: bool(closing))
        async with asyncio.timeout(5):
            await closing[0]
    finally:
        await stop_replica(replica)


async def test_an_address_that_returns_while_it_leaves_goes_on_as_if_it_had_stayed() -> None:
    async with setup(replicas=1) as fleet:
        replica = fleet.replicas[0]
        route = await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=300)])
        replica.runner.gate.clear()
        fleet.discovery.set()
        await eventually(lambda: not fleet.fleet.links)
        fleet.discovery.set(replica.address)
        await eventually(lambda: len(fleet.fleet.ready(MODEL)) == 1)
        replica.runner.gate.set()
        assert await finishes(route) == [FINISH_REASON_LENGTH]
        await asyncio.sleep(0.2)  # were the old link to go now, it would take the view with it
        assert (await fleet.generate(prompt(1, tail=1))).cached_tokens == 40
        await fleet.settled()
        assert fleet.index.blocks


async def test_a_burst_larger_than_a_message_goes_in_several_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = [o for o in link_module.CHANNEL_OPTIONS if o[0] != "grpc.max_send_message_length"]
    small = [*options, ("grpc.max_send_message_length", 8192)]
    monkeypatch.setattr(link_module, "CHANNEL_OPTIONS", small)
    monkeypatch.setattr(link_module, "FRAME_BYTES", 4096, raising=False)
    async with setup(replicas=1) as fleet:
        opening = [
            fleet.dispatcher.open(prompt(seed, tokens=500), [Sampling(max_tokens=1)] * 2)
            for seed in range(3)
        ]
        routes = await asyncio.gather(*opening)
        for route in routes:
            assert await finishes(route) == [FINISH_REASON_LENGTH] * 2
        assert fleet.dispatcher.retries == 0


async def test_a_lost_replica_holds_nothing_in_the_index() -> None:
    async with setup(replicas=1) as fleet:
        await fleet.generate(prompt(1))
        await fleet.settled()
        assert fleet.index.blocks
        await stop_replica(fleet.replicas[0])
        await eventually(lambda: fleet.fleet.links[0].state is State.CONNECTING)
        assert fleet.index.blocks == 0


async def test_only_a_prompt_that_is_placed_again_counts_as_a_retry() -> None:
    async with setup(replicas=1) as fleet:
        fleet.replicas[0].runner.gate.clear()
        opening = asyncio.create_task(fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=2)]))
        await eventually(lambda: fleet.fleet.links[0].in_flight == 1)
        fleet.replicas[0].runner.broken = True
        await stop_replica(fleet.replicas[0])
        with pytest.raises(Unavailable):
            await opening
        assert fleet.dispatcher.retries == 0


async def test_a_refused_replica_that_goes_is_no_longer_refused() -> None:
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
        await stop_replica(stranger)
        await eventually(lambda: fleet.links[0].state is State.CONNECTING)
        assert fleet.links[0].problem == ""
    finally:
        await fleet.stop()


async def test_a_stopped_process_is_lost_though_its_connection_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.5)
    with process(tmp_path / "log", str(ROOT / "tests" / "hung_replica.py")) as here:
        address, _ = here.addresses()
        fleet = Fleet(
            ListedDiscovery(address), {MODEL: ""}, lambda a: View(Index(), a, Counter()), drain_s=1
        )
        await fleet.start()
        try:
            await eventually(lambda: len(fleet.ready(MODEL)) == 1)
            await asyncio.sleep(1)
            assert fleet.links[0].watcher.recoveries.total() == 0
            assert fleet.ready(MODEL), "reports keep it alive"
            here.popen.send_signal(signal.SIGSTOP)
            await eventually(lambda: fleet.links[0].state is State.CONNECTING)
            here.popen.send_signal(signal.SIGCONT)
            await eventually(lambda: len(fleet.ready(MODEL)) == 1)
        finally:
            await fleet.stop()


async def test_a_sibling_that_leaves_takes_nothing_from_those_who_stay() -> None:
    async with setup(replicas=1) as fleet:
        fleet.replicas[0].runner.gate.clear()  # nothing is reported
        opening = [
            asyncio.create_task(fleet.dispatcher.open(prompt(1, tail=i), [Sampling(max_tokens=1)]))
            for i in range(3)
        ]
        await eventually(lambda: fleet.dispatcher.open_routes == 3)
        for leaving in opening[:2]:
            leaving.cancel()
        await eventually(lambda: fleet.dispatcher.open_routes == 1)
        assert fleet.index.predicted_blocks == 11, "its own path is still predicted"
        opening[2].cancel()
        await asyncio.wait(opening)
        assert fleet.index.predicted_blocks == 0


async def test_a_prompt_goes_where_it_fits() -> None:
    async with setup(replicas=1, kv_tokens=2048) as fleet:
        small = await start_replica(kv_tokens=256)
        try:
            fleet.discovery.set(fleet.replicas[0].address, small.address)
            await eventually(lambda: len(fleet.fleet.ready(MODEL)) == 2)
            for seed in range(8):
                route = await fleet.generate(prompt(seed, tokens=400))
                assert route.replica_id == fleet.replicas[0].address
            with pytest.raises(Refused):
                await fleet.dispatcher.open(prompt(1, tokens=5000), [Sampling(max_tokens=1)])
        finally:
            await stop_replica(small)
