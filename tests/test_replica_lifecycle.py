"""A replica as a server: what it says of itself, draining, stopping, failing, metrics."""

import asyncio
import math
import urllib.request
from typing import Any

import grpc
import pytest
from gated_replica import BLOCK, MODEL, PATIENCE_S, Replica, eventually, replica
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from replica_client import Client, View, endless, submit

from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import WatchRequest
from hotbranch.v1.serve_pb2 import FINISH_REASON_CANCELLED, Rejection
from replicas import server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def turns(here: Replica, wanted: int) -> None:
    """Wait until the health service says so."""
    stub: Any = health_pb2_grpc.HealthStub(here.channel)
    for service in ("", "hotbranch.v1.Replica"):
        request = health_pb2.HealthCheckRequest(service=service)
        async with asyncio.timeout(PATIENCE_S):
            async for reply in stub.Watch(request):
                if reply.status == wanted:
                    break


async def test_description() -> None:
    async with replica(replica_id="r7") as here:
        found: pb.Description = await here.stub.Describe(pb.DescribeRequest())
        assert (found.replica_id, found.model, found.engine) == ("r7", MODEL, "radix")
        assert (found.block_size, found.capacity_blocks, found.vocab_size) == (BLOCK, 512, 1000)
        assert found.max_context == 4096
        assert found.tokenizer_fingerprint == "fingerprint"
        assert found.metrics_address == here.server.metrics_address
        assert not found.draining
        assert 0 < found.epoch < 1 << 63


async def test_drain() -> None:
    async with replica() as here:
        client = Client(here)
        await turns(here, SERVING)
        here.runner.gate.clear()
        await client.send(submit(1), submit(2))
        await eventually(here.runner.entered.is_set)
        reply: pb.DrainReply = await here.stub.Drain(pb.DrainRequest(deadline_s=0.01))
        assert reply.unfinished == 2
        await client.send(submit(3))
        assert (await client.refused(3)).reason == Rejection.REASON_DRAINING
        await turns(here, NOT_SERVING)
        assert (await here.stub.Describe(pb.DescribeRequest())).draining
        waiting = asyncio.create_task(here.server.drain(PATIENCE_S))
        await asyncio.sleep(0)
        assert not waiting.done()
        here.runner.gate.set()
        await client.finish(1, 2)
        assert await waiting == 0


@pytest.mark.parametrize("deadline_s", [1e9, math.inf])
async def test_a_drain_may_wait_for_as_long_as_it_takes(deadline_s: float) -> None:
    async with replica() as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1))
        await eventually(here.runner.entered.is_set)
        drained = asyncio.ensure_future(here.stub.Drain(pb.DrainRequest(deadline_s=deadline_s)))
        await turns(here, NOT_SERVING)
        here.runner.gate.set()
        reply: pb.DrainReply = await drained
        assert reply.unfinished == 0


async def test_stop_ends_what_runs_and_every_stream() -> None:
    async with replica() as here:
        client, view = Client(here), View()
        follower = asyncio.create_task(view.follow(here.stub.WatchCache(WatchRequest())))
        await client.send(endless(1))
        await client.read(lambda: bool(client.deltas(1)))
        stopping = asyncio.create_task(here.server.stop(0))
        await client.finish(1)
        assert client.deltas(1)[-1].finish == FINISH_REASON_CANCELLED
        assert await client.call.read() is grpc.aio.EOF
        await follower
        await stopping


async def test_stop_leaves_an_engine_that_hangs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ENGINE_STOP_S", 0.2)
    async with replica() as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1))
        await eventually(here.runner.entered.is_set)
        await here.server.stop(0)
        assert not here.runner.gate.is_set()
        assert await client.call.read() is grpc.aio.EOF  # the engine has not ended the request


async def test_an_engine_that_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GIVE_UP_S", 0.3)
    async with replica() as here:
        await turns(here, SERVING)
        here.runner.broken = True
        client = Client(here)
        for ticket in range(3):
            await client.send(submit(ticket))
            await client.finish(ticket)
        await turns(here, NOT_SERVING)
        await client.send(submit(9))
        assert (await client.refused(9)).reason == Rejection.REASON_OVERLOADED
        async with asyncio.timeout(PATIENCE_S):
            assert "device is gone" in await here.server.failure()


async def test_reflection_lists_the_service() -> None:
    async with replica() as here:
        channel: Any = here.channel  # typed for synchronous channels only
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in reply.list_services_response.service}
        assert {"hotbranch.v1.Replica", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("which", ["grpc_port", "metrics_port"])
async def test_a_port_in_use_is_named(which: str) -> None:
    async with replica() as here:
        taken = here.server.address if which == "grpc_port" else here.server.metrics_address
        options: Any = {which: int(taken.rpartition(":")[2])}
        with pytest.raises(OSError, match=taken):
            async with replica(**options):
                pass


async def test_metrics() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(submit(1))
        await client.finish(1)
        await client.send(submit(2), submit(3, model="other"))
        await client.finish(2)
        await client.refused(3)
        url = f"http://{here.server.metrics_address}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        samples = dict(
            line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")
        )
        for name, value in {
            'requests_total{reason="length"}': 2,
            'requests_total{reason="error"}': 0,
            'rejections_total{reason="invalid"}': 1,
            "prompt_tokens_total": 20,
            "cached_tokens_total": 8,
            "generated_tokens_total": 8,
            "time_to_first_token_seconds_count": 2,
            "inter_token_seconds_count": 6,
            "open_streams": 1,
            "running_requests": 0,
            "total_blocks": 512,
            "cached_blocks": len(await here.cached()),
        }.items():
            assert float(samples[f"hotbranch_replica_{name}"]) == value, name
