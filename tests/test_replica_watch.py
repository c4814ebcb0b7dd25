"""The cache of a replica as others see it: WatchCache, Flush and pins."""

import asyncio
import math
import random
from collections.abc import Iterable

import grpc
import pytest
from gated_replica import BLOCK, MODEL, VOCABULARY, Replica, connect, eventually, replica
from replica_client import Client, View, lost, submit

from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import WatchRequest
from replicas import messages, service


async def churn(here: Replica, seed: int, requests: int) -> None:
    """Prompts that share prefixes, a few at a time, more than the pool can hold."""
    chance, client = random.Random(seed), Client(here)
    for first in range(0, requests, 5):
        tickets = range(first, first + 5)
        for ticket in tickets:
            family = [chance.randrange(8)] * (BLOCK * chance.randrange(1, 9))
            own = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))]
            salt = chance.choice(["", "other"])
            await client.send(submit(ticket, family + own, salt=salt))
        await client.finish(*tickets)
    await client.call.done_writing()


async def settled(here: Replica, views: Iterable[View]) -> dict[int, int | None]:
    """The engine's blocks, once every view has heard of its last delta."""
    truth = await here.cached()
    await eventually(lambda: all(view.blocks == truth for view in views))
    return truth


async def test_snapshot_and_deltas_are_what_the_engine_holds() -> None:
    async with replica(kv_tokens=400, max_running=4) as here:
        chance = random.Random(1)
        views: list[View] = []
        followers: list[asyncio.Task[None]] = []
        load = [asyncio.create_task(churn(here, seed, 60)) for seed in range(3)]
        while not all(task.done() for task in load):
            if len(views) < 30:
                views.append(View())
                call = here.stub.WatchCache(WatchRequest())
                followers.append(asyncio.create_task(views[-1].follow(call)))
            await asyncio.sleep(chance.random() * 0.02)
        await asyncio.gather(*load)
        truth = await settled(here, views)
        assert truth
        assert here.engine.load().evicted_blocks > 100
        assert len({view.sequence for view in views}) == 1
        assert not any(task.done() for task in followers)  # an assertion in one would end it
        for task in followers:
            task.cancel()


async def test_a_long_snapshot_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SNAPSHOT_KEYS", 7)
    async with replica() as here:
        await churn(here, 3, 10)
        view = View()
        follower = asyncio.create_task(view.follow(here.stub.WatchCache(WatchRequest())))
        assert len(await settled(here, [view])) > 2 * 7
        assert view.largest_message == 7
        follower.cancel()


async def test_flush_starts_an_epoch_on_the_same_stream() -> None:
    async with replica(kv_tokens=400) as here:
        views = [View() for _ in range(5)]
        calls = [here.stub.WatchCache(WatchRequest()) for _ in views]
        followers = [
            asyncio.create_task(view.follow(call)) for view, call in zip(views, calls, strict=True)
        ]
        load = asyncio.create_task(churn(here, 5, 150))
        epochs = [(await here.stub.Describe(pb.DescribeRequest())).epoch]
        for _ in range(4):
            await asyncio.sleep(0.03)
            epochs.append((await here.stub.Flush(pb.FlushRequest())).epoch)
        assert (await here.stub.Describe(pb.DescribeRequest())).epoch == epochs[-1]
        assert len(set(epochs)) == 5
        await load
        await settled(here, views)
        assert {view.epoch for view in views} == {epochs[-1]}
        assert {view.snapshots for view in views} == {5}
        await here.stub.Flush(pb.FlushRequest())
        await eventually(lambda: all(view.snapshots == 6 for view in views))
        assert all(view.sequence == 0 and not view.blocks for view in views)
        assert not any(task.done() for task in followers)
        for task in followers:
            task.cancel()


async def test_a_slow_watcher_loses_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "UPDATES", 64)
    async with replica(kv_tokens=400) as here, connect(here.server) as other:
        slow = Replica(here.server, here.engine, here.runner, other)
        call = slow.stub.WatchCache(WatchRequest())
        await call.read()
        view = View()
        follower = asyncio.create_task(view.follow(here.stub.WatchCache(WatchRequest())))
        while view.sequence < 400:
            await churn(here, view.sequence, 50)
        await settled(here, [view])
        assert not follower.done()
        assert await lost(call) == grpc.StatusCode.RESOURCE_EXHAUSTED
        follower.cancel()


async def test_load_reports_during_a_long_step() -> None:
    async with replica() as here:
        client, view = Client(here), View()
        follower = asyncio.create_task(view.follow(here.stub.WatchCache(WatchRequest())))
        await eventually(lambda: view.snapshots == 1)
        here.runner.gate.clear()
        here.runner.entered.clear()
        await client.send(submit(1))
        await eventually(here.runner.entered.is_set)
        before, late = view.loads, View()
        newcomer = asyncio.create_task(late.follow(here.stub.WatchCache(WatchRequest())))
        await eventually(lambda: view.loads - before >= 9 and late.loads >= 9)
        assert not client.frames
        assert not late.snapshots  # it waits for the step, and the router does not take it for dead
        here.runner.gate.set()
        await client.finish(1)
        await eventually(lambda: late.snapshots == 1)
        assert not follower.done()
        assert not newcomer.done()
        follower.cancel()
        newcomer.cancel()


async def test_pin_and_unpin() -> None:
    async with replica() as here:
        client, prompt = Client(here), submit(1)
        await client.send(prompt)
        await client.finish(1)
        space = pb.Namespace(model=MODEL)
        pin = pb.PinRequest(namespace=space, token_ids=prompt.token_ids, ttl_s=60)
        assert (await here.stub.Pin(pin)).pinned_blocks == 2
        unpin = pb.UnpinRequest(namespace=space, token_ids=prompt.token_ids)
        assert (await here.stub.Unpin(unpin)).unpinned_blocks == 2
        assert (await here.stub.Unpin(unpin)).unpinned_blocks == 0


@pytest.mark.parametrize(
    ("tokens", "ttl_s", "model", "code"),
    [
        (200, 60, MODEL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (8, 0, MODEL, grpc.StatusCode.INVALID_ARGUMENT),
        (8, math.nan, MODEL, grpc.StatusCode.INVALID_ARGUMENT),
        (8, 60, "other", grpc.StatusCode.INVALID_ARGUMENT),
        (8.25, 60, MODEL, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_pins_that_are_refused(
    tokens: float, ttl_s: float, model: str, code: grpc.StatusCode
) -> None:
    async with replica(kv_tokens=400) as here:
        client = Client(here)
        await client.send(submit(1, [0] * 200))
        await client.finish(1)
        pin = pb.PinRequest(token_ids=bytes(int(4 * tokens)), ttl_s=ttl_s)
        pin.namespace.model = model
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.stub.Pin(pin)
        assert caught.value.code() == code
