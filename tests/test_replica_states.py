"""The states of a replica on the contract and in its metrics, from loading to its end."""

import asyncio
import math
import mmap
import re
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from gated_replica import MODEL, PATIENCE_S, Replica, eventually, replica
from grpc_health.v1 import health_pb2, health_pb2_grpc
from replica_client import Client, View, endless, submit
from sleepy_engine import SleepyEngine
from test_replica_main import ROOT, Process, process
from test_replica_main import replica as command

from hotbranch.settings import EngineSettings, ReplicaSettings
from hotbranch.states import NAMES
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import WatchRequest
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, ClientFrame, Rejection
from replicas import build, server
from replicas.condition import Condition
from replicas.engine import Engine, Fault, StartError
from replicas.server import ReplicaServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def shown(metrics_address: str) -> set[str]:
    """The states that the metrics name."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics") as page:
        text = page.read().decode()
    states = dict(re.findall(r'^hotbranch_replica_state\{state="(\w+)"\} (\S+)$', text, re.M))
    assert states.keys() == set(NAMES.values())
    return {name for name, value in states.items() if float(value)}


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await call
    return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[tuple[ReplicaServer, Any]]:
    """A server without an engine, and a stub to it."""
    here = ReplicaServer(ReplicaSettings(**options))
    await here.start()
    try:
        async with grpc.aio.insecure_channel(here.address) as channel:
            yield here, ReplicaStub(channel)
    finally:
        await here.stop(0)


# Loading, and what can fail in it


async def test_while_it_loads_a_replica_says_only_what_it_is() -> None:
    built = threading.Event()

    def slowly() -> tuple[Engine, str, str]:
        built.wait(PATIENCE_S)
        raise StartError(Fault.START_FAILED, "enough")

    async with listening(replica_id="r7", served_name="tiny") as (here, stub):
        loading = asyncio.create_task(here.load(slowly))
        found = await stub.Describe(pb.DescribeRequest())
        assert found == pb.Description(
            replica_id="r7", model="tiny", engine="radix", state=pb.STATE_LOADING
        )
        for call in (
            stub.Serve().read(),
            stub.WatchCache(WatchRequest()).read(),
            stub.Pin(pb.PinRequest(ttl_s=1)),
            stub.Unpin(pb.UnpinRequest()),
            stub.Drain(pb.DrainRequest()),
            stub.Flush(pb.FlushRequest()),
            stub.Sleep(pb.SleepRequest()),
            stub.Wake(pb.WakeRequest()),
        ):
            assert await refusal(call) == (UNAVAILABLE, "the engine is loading")
        assert await asyncio.to_thread(shown, here.metrics_address) == {"loading"}
        built.set()
        with pytest.raises(StartError, match="enough"):
            await loading


async def test_a_loaded_replica_serves() -> None:
    async with replica() as here:
        found = await here.stub.Describe(pb.DescribeRequest())
        assert (found.state, found.problem, found.model) == (pb.STATE_SERVING, "", MODEL)
        assert await asyncio.to_thread(shown, here.server.metrics_address) == {"serving"}
        health: Any = health_pb2_grpc.HealthStub(here.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING


@pytest.mark.parametrize(
    ("error", "state", "problem"),
    [
        (StartError(Fault.OUT_OF_MEMORY, "too large"), pb.STATE_OUT_OF_MEMORY, "too large"),
        (StartError(Fault.BAD_SETTINGS, "no"), pb.STATE_START_FAILED, "no"),
        (RuntimeError("boom\nbelow"), pb.STATE_START_FAILED, "RuntimeError: boom"),
    ],
)
async def test_an_engine_that_cannot_be_built_is_told(
    error: Exception, state: pb.State, problem: str
) -> None:
    def fail() -> tuple[Engine, str, str]:
        raise error

    async with listening() as (here, stub):
        with pytest.raises(StartError, match=f"^{problem}$"):
            await here.load(fail)
        found = await stub.Describe(pb.DescribeRequest())
        assert (found.state, found.problem) == (state, problem)
        assert await refusal(stub.Serve().read()) == (UNAVAILABLE, problem)
        assert await asyncio.to_thread(shown, here.metrics_address) == {NAMES[state]}


@pytest.mark.parametrize(
    ("fail", "fault"),
    [
        (lambda: torch.empty(1 << 60), Fault.OUT_OF_MEMORY),
        (lambda: bytearray(1 << 62), Fault.OUT_OF_MEMORY),
        (lambda: mmap.mmap(-1, 1 << 56), Fault.OUT_OF_MEMORY),
        (lambda: Path("/none").read_text(), Fault.MODEL_NOT_FOUND),
        (lambda: Path("/").read_text(), Fault.BAD_SETTINGS),
        (lambda: int("x"), Fault.BAD_SETTINGS),
    ],
)
def test_what_the_errors_of_loading_mean(
    fail: Callable[[], Any], fault: Fault, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "radix", lambda *arguments: fail())
    with pytest.raises(StartError, match=r"^.+$") as caught:
        build.build_engine(EngineSettings(model=str(smollm2)))
    assert caught.value.fault is fault


def address_of(here: Process) -> tuple[str, str]:
    """Where a process answers that has no engine yet."""
    here.says("loading on")
    found = re.search(r"loading on (\S+), metrics on ([^\s\"]+)", here.log.read_text())
    assert found
    return found[1], found[2]


@pytest.mark.parametrize(
    ("flags", "state", "status", "problem"),
    [
        (["--model", "/none"], pb.STATE_MODEL_NOT_FOUND, 2, "neither smollm2 nor a directory"),
        (["--kv-tokens", "1000000000000"], pb.STATE_OUT_OF_MEMORY, 3, "takes [0-9.]+ GiB"),
        (["--kv-tokens", "8"], pb.STATE_START_FAILED, 2, "less than one block"),
        (["--model", "broken"], pb.STATE_START_FAILED, 1, "Exception: "),
    ],
)
def test_a_process_that_cannot_start_tells_why_and_ends(
    flags: list[str], state: pb.State, status: int, problem: str, tmp_path: Path, smollm2: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((smollm2 / "config.json").read_text())
    (broken / "tokenizer.json").write_text("not a tokenizer")
    flags = [str(broken) if flag == "broken" else flag for flag in flags]
    with process(tmp_path / "log", *command(*flags)) as here:
        address, metrics_address = address_of(here)
        with grpc.insecure_channel(address) as channel:
            stub = ReplicaStub(channel)
            while (found := stub.Describe(pb.DescribeRequest())).state == pb.STATE_LOADING:
                assert not found.problem
            assert found.state == state
            assert re.search(problem, found.problem)
        assert shown(metrics_address) == {NAMES[state]}
        assert here.popen.wait(PATIENCE_S) == status
    assert f"hotbranch replica: {found.problem}\n" in here.log.read_text()


def test_a_signal_ends_a_process_that_loads(tmp_path: Path) -> None:
    with process(tmp_path / "log", str(ROOT / "tests" / "loading_replica.py")) as here:
        address_of(here)
        here.popen.terminate()
        assert here.popen.wait(PATIENCE_S) == 0
    assert "terminate called" not in here.log.read_text()


# Dead and hung


def test_an_engine_hangs_that_ends_no_step_though_requests_are_open() -> None:
    count, sickness = 0, ""

    class Told:
        def healthy(self) -> str:
            return sickness

    here = pb.Description()
    condition = Condition(here, 10.0, lambda: count)
    engine: Any = Told()
    condition.attach(engine, 0.0)
    condition.look(100.0)
    assert here.state == pb.STATE_SERVING, "nothing is open"
    count = 2
    condition.look(109.0)
    assert here.state == pb.STATE_SERVING
    condition.stepped(109.5)
    condition.look(119.0)
    assert here.state == pb.STATE_SERVING, "steps end"
    condition.look(119.5)
    assert (here.state, condition.sick) == (pb.STATE_HUNG, True)
    assert here.problem == "no step has ended for 10 s, 2 requests are open"
    sickness = "it ended"
    condition.look(120.0)
    assert (here.state, here.problem, condition.sick) == (pb.STATE_DEAD, "it ended", True)
    sickness = ""
    condition.stepped(121.0)
    condition.look(122.0)
    assert (here.state, here.problem, condition.sick) == (pb.STATE_SERVING, "", False)


async def test_a_dead_engine_is_told_until_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GIVE_UP_S", math.inf)
    async with replica(max_running=1) as here:
        client, runner = Client(here), here.runner
        runner.broken = runner.singly = True
        runner.gate.clear()
        await client.send(*map(submit, range(4)))
        for _ in range(3):
            runner.gate.set()
            await client.read_more()  # that a request has failed
        await turns(here, pb.STATE_DEAD)
        found = await here.stub.Describe(pb.DescribeRequest())
        assert "device is gone" in found.problem
        assert await asyncio.to_thread(shown, here.server.metrics_address) == {"dead"}
        runner.broken = runner.singly = False
        runner.gate.set()  # for the last one
        await turns(here, pb.STATE_SERVING)


async def test_steps_that_end_are_no_hang_however_long_a_request_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "GIVE_UP_S", math.inf)
    async with replica(step_timeout_s=1) as here:
        client = Client(here)
        here.runner.pace_s = 0.1
        await client.send(endless(1))
        states = set()
        for _ in range(30):
            states.add((await here.stub.Describe(pb.DescribeRequest())).state)
            await client.read_more()
        assert states == {pb.STATE_SERVING}
        here.runner.gate.clear()
        await turns(here, pb.STATE_HUNG)
        await client.send(submit(2))
        assert (await client.refused(2)).reason == Rejection.REASON_OVERLOADED
        here.runner.gate.set()
        await turns(here, pb.STATE_SERVING)


def test_a_process_whose_engine_hangs_ends_and_its_successor_has_a_new_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("HOTBRANCH_STEP_TIMEOUT_S", "0.5")
    monkeypatch.setenv("HOTBRANCH_GRPC_PORT", str(free_port))
    epochs = set()
    for _ in range(2):
        with process(tmp_path / "log", str(ROOT / "tests" / "hung_replica.py")) as here:
            address, metrics_address = here.addresses()
            with grpc.insecure_channel(address) as channel:
                stub = ReplicaStub(channel)
                epochs.add(stub.Describe(pb.DescribeRequest()).epoch)
                frames = stub.Serve(iter([ClientFrame(submit=[endless(1)])]), timeout=PATIENCE_S)
                deadline = time.monotonic() + PATIENCE_S
                while (found := stub.Describe(pb.DescribeRequest())).state == pb.STATE_SERVING:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert found.state == pb.STATE_HUNG
                assert "no step has ended" in found.problem
                assert shown(metrics_address) == {"hung"}
                frames.cancel()
            assert here.popen.wait(PATIENCE_S) == 1
        assert "the engine has failed: no step has ended" in here.log.read_text()
    assert len(epochs) == 2


# Asleep


async def turns(here: Replica, state: pb.State) -> None:
    """Wait until it says so."""
    async with asyncio.timeout(PATIENCE_S):
        while (await here.stub.Describe(pb.DescribeRequest())).state != state:
            await asyncio.sleep(0.01)


async def test_asleep_it_caches_nothing_and_serves_nobody() -> None:
    async with replica(engine_type=SleepyEngine) as here:
        client, view = Client(here), View()
        following = asyncio.create_task(view.follow(here.stub.WatchCache(WatchRequest())))
        await client.send(submit(1))
        await client.finish(1)
        await eventually(lambda: bool(view.blocks))
        before = view.epoch
        epoch = (await here.stub.Sleep(pb.SleepRequest())).epoch
        await turns(here, pb.STATE_ASLEEP)
        await eventually(lambda: view.epoch == epoch)
        assert epoch != before
        assert view.blocks == {}
        assert await asyncio.to_thread(shown, here.server.metrics_address) == {"asleep"}
        await client.send(submit(2))
        assert (await client.refused(2)).reason == Rejection.REASON_DRAINING
        assert (await here.stub.Sleep(pb.SleepRequest())).epoch == epoch, "it does already"
        assert here.engine.turns == ["sleep"]
        await here.stub.Wake(pb.WakeRequest())
        await turns(here, pb.STATE_SERVING)
        await client.send(submit(3))
        await client.finish(3)
        assert client.deltas(3)[-1].finish == FINISH_REASON_LENGTH
        following.cancel()


async def test_what_does_not_wake_sleeps_on_and_says_why() -> None:
    async with replica(engine_type=SleepyEngine) as here:
        await here.stub.Sleep(pb.SleepRequest())
        here.engine.trouble = "no memory"
        code, problem = await refusal(here.stub.Wake(pb.WakeRequest()))
        assert (code, problem) == (grpc.StatusCode.INTERNAL, "it cannot wake: no memory")
        await asyncio.sleep(3 * server.HEALTH_INTERVAL_S)
        found = await here.stub.Describe(pb.DescribeRequest())
        assert (found.state, found.problem) == (pb.STATE_ASLEEP, problem)
        here.engine.trouble = ""
        await here.stub.Wake(pb.WakeRequest())
        found = await here.stub.Describe(pb.DescribeRequest())
        assert (found.state, found.problem) == (pb.STATE_SERVING, "")


async def test_what_cannot_sleep_serves_on() -> None:
    async with replica(engine_type=SleepyEngine) as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1))
        await eventually(here.runner.entered.is_set)
        refused = await refusal(here.stub.Sleep(pb.SleepRequest()))
        assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "1 requests are open")
        here.runner.gate.set()
        await client.finish(1)
        here.engine.trouble = "it is a bad time"
        refused = await refusal(here.stub.Sleep(pb.SleepRequest()))
        assert refused == (grpc.StatusCode.INTERNAL, "it cannot sleep: it is a bad time")
        await client.send(submit(2))
        await client.finish(2)


async def test_it_wakes_though_whoever_asked_has_gone() -> None:
    async with replica(engine_type=SleepyEngine) as here:
        await here.stub.Sleep(pb.SleepRequest())
        here.engine.gate.clear()
        waking = here.stub.Wake(pb.WakeRequest())
        await eventually(lambda: here.engine.turns == ["sleep", "wake"])
        waking.cancel()
        await asyncio.sleep(0.1)
        here.engine.gate.set()
        await turns(here, pb.STATE_SERVING)


async def test_an_engine_that_cannot_sleep_says_so() -> None:
    async with replica() as here:
        for call in (here.stub.Sleep(pb.SleepRequest()), here.stub.Wake(pb.WakeRequest())):
            code, problem = await refusal(call)
            assert (code, problem) == (
                grpc.StatusCode.UNIMPLEMENTED,
                "the radix engine cannot sleep",
            )
        assert (await here.stub.Describe(pb.DescribeRequest())).state == pb.STATE_SERVING
