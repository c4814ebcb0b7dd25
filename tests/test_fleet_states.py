"""What a router makes of the states of a replica: it waits, says why, and comes back."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from gated_replica import MODEL, PATIENCE_S, VOCABULARY, GatedRunner, Letters
from sleepy_engine import SleepyEngine
from test_fleet import (
    BLOCK,
    Setup,
    eventually,
    prompt,
    router,
    setup,
    start_replica,
    stop_replica,
)
from test_router_metrics import metrics_of, samples
from told_replica import told_replica

from hotbranch.settings import ReplicaSettings
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import Sampling
from replicas import server as server_module
from replicas.engine import Engine, Fault, StartError
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.server import HEALTH_INTERVAL_S, ReplicaServer
from router.fleet import link as link_module
from router.fleet.holder import Holder
from router.fleet.link import State
from router.generation import Unavailable
from router.observe.admin import Admin


class Loading:
    """A replica that loads until a test says how that ends."""

    def __init__(self, port: int = 0) -> None:
        self.settings = ReplicaSettings(block_size=BLOCK, kv_tokens=2048, grpc_port=port)
        self.server = ReplicaServer(self.settings)
        self.error: Exception | None = None
        self.end = threading.Event()

    def build(self) -> tuple[Engine, str, str]:
        assert self.end.wait(PATIENCE_S)
        if self.error:
            raise self.error
        limits = Limits.of(self.settings, max_context=1024)
        runner = GatedRunner(2048 // BLOCK, BLOCK)
        engine = RadixEngine(limits, runner, frozenset(), lambda _: Letters(1), VOCABULARY)
        return engine, MODEL, "ours"


@asynccontextmanager
async def loading(
    fleet: Setup, port: int = 0
) -> AsyncIterator[tuple[Loading, "asyncio.Task[None]"]]:
    """A replica of the fleet that loads."""
    here = Loading(port)
    await here.server.start()
    task = asyncio.create_task(here.server.load(here.build))
    fleet.discovery.set(here.server.address)
    try:
        yield here, task
    finally:
        here.end.set()
        await asyncio.wait((task,))
        await here.server.stop(0)


async def shown(fleet: Setup) -> tuple[str, str, str]:
    """State, reported state and problem of the only replica, in the listing and the metrics."""
    request: Any = None
    listing = json.loads((await Admin(fleet.fleet, fleet.index).replicas(request)).body)  # type: ignore[arg-type]
    (entry,) = listing["replicas"]
    states = {
        key[-1]
        for key, value in samples(metrics_of(fleet)).items()
        if key[0] == "hotbranch_replica_reported_state" and value
    }
    assert states == ({entry["reported_state"]} - {""})
    return entry["state"], entry["reported_state"], entry["problem"]


async def test_a_loading_replica_is_waited_for() -> None:
    async with router([]) as fleet, loading(fleet) as (here, task):
        await eventually(lambda: any(link.reported_state for link in fleet.fleet.links))
        link = fleet.fleet.links[0]
        seen = [await shown(fleet)]
        await asyncio.sleep(3 * link_module.STATE_POLL_S)
        seen.append(await shown(fleet))
        assert seen == [("connecting", "loading", "")] * 2
        with pytest.raises(Unavailable):
            await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=1)])
        here.end.set()
        await task
        await eventually(lambda: fleet.fleet.ready(MODEL) == [link])
        assert await shown(fleet) == ("ready", "serving", "")
        await fleet.generate(prompt(1))


async def test_why_a_replica_does_not_start_is_seen_and_its_successor_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with router([]) as fleet:
        async with loading(fleet) as (here, task):
            here.error = StartError(Fault.OUT_OF_MEMORY, "the GPU is too small")
            here.end.set()
            with pytest.raises(StartError):
                await task
            wanted = ("connecting", "out_of_memory", "the GPU is too small")
            link = fleet.fleet.links[0]
            await eventually(lambda: bool(link.problem))
            assert await shown(fleet) == wanted
            told = [vars(record).get("fields", {}) for record in caplog.records]
            assert [one["state"] for one in told if "small" in one.get("reason", "")] == [wanted[1]]
        await eventually(lambda: link.reported_state == "")
        port = int(link.address.rpartition(":")[2])
        async with loading(fleet, port) as (again, task):
            again.end.set()
            await eventually(lambda: fleet.fleet.ready(MODEL) == [link])
            assert await shown(fleet) == ("ready", "serving", "")


async def test_a_replica_once_refused_may_load_another_model() -> None:
    async with router([]) as fleet, told_replica(tokenizer_fingerprint="theirs") as told:
        fleet.discovery.set(told.address)
        await eventually(lambda: [one.state for one in fleet.fleet.links] == [State.REFUSED])
        told.description.state = pb.STATE_LOADING
        await eventually(lambda: fleet.fleet.links[0].reported_state == "loading")
        assert await shown(fleet) == ("connecting", "loading", "")
        told.description.state = pb.STATE_SERVING
        told.description.tokenizer_fingerprint = "ours"
        await eventually(lambda: fleet.fleet.links[0].state is State.READY)


async def test_a_sleeping_replica_gets_nothing_and_comes_back_without_a_new_connection() -> None:
    async with setup(engine_type=SleepyEngine) as fleet:
        home = fleet.of(await fleet.generate(prompt(1)))
        await fleet.settled()
        link = fleet.link(home)
        async with grpc.aio.insecure_channel(home.address) as channel:
            stub: Any = ReplicaStub(channel)
            await stub.Sleep(pb.SleepRequest())
            await eventually(lambda: link.state is State.DRAINING)
            await eventually(lambda: link.reported_state == "asleep")
            await eventually(lambda: not fleet.index.held(Holder(home.address)))
            for tail in range(4):
                assert (await fleet.generate(prompt(1, tail=tail))).replica_id != home.address
            assert home.engine.load().running == 0
            await stub.Wake(pb.WakeRequest())
        await eventually(lambda: link.state is State.READY)
        await eventually(lambda: link.reported_state == "serving")
        assert fleet.recoveries.keys() == {"epoch"}, "no reconnect"
        homes = {(await fleet.generate(prompt(seed))).replica_id for seed in range(20, 30)}
        assert home.address in homes


async def test_a_replica_found_asleep_serves_once_it_wakes() -> None:
    home = await start_replica(engine_type=SleepyEngine)
    try:
        async with grpc.aio.insecure_channel(home.address) as channel, router([]) as fleet:
            stub: Any = ReplicaStub(channel)
            await stub.Sleep(pb.SleepRequest())
            fleet.discovery.set(home.address)
            states = set()

            def known() -> bool:
                states.update(link.state for link in fleet.fleet.links)
                return any(link.reported_state == "asleep" for link in fleet.fleet.links)

            await eventually(known)
            assert State.READY not in states
            await asyncio.sleep(2 * HEALTH_INTERVAL_S)
            assert not fleet.fleet.ready(MODEL)
            await stub.Wake(pb.WakeRequest())
            await eventually(lambda: bool(fleet.fleet.ready(MODEL)))
            await fleet.generate(prompt(1))
    finally:
        await stop_replica(home)


async def test_what_is_wrong_with_a_dead_engine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GIVE_UP_S", math.inf)
    async with setup(replicas=1) as fleet:
        fleet.replicas[0].runner.broken = True
        for _ in range(3):
            with pytest.raises(Unavailable):
                await fleet.dispatcher.open(prompt(1), [Sampling(max_tokens=1)])
        link = fleet.fleet.links[0]
        await eventually(lambda: link.reported_state == "dead")
        state, _, problem = await shown(fleet)
        assert state == "draining"
        assert "the device is gone" in problem
