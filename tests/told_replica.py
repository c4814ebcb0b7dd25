"""A replica on real gRPC without an engine: it reports what a test tells it to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from gated_replica import MODEL
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from test_fleet import Setup, eventually, router

from hotbranch.keys import key_check
from hotbranch.v1.cache_pb2 import CacheUpdate, Run, Snapshot, WatchRequest
from hotbranch.v1.replica_pb2 import DescribeRequest, Description
from hotbranch.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from hotbranch.v1.serve_pb2 import (
    FINISH_REASON_LENGTH,
    ClientFrame,
    Delta,
    ServerFrame,
    Submit,
)

EPOCH = 7
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class ToldReplica(ReplicaServicer):
    """Answers every submission with `script`, one token where a test says nothing else, and says
    that all it was believed to hold is so."""

    description: Description
    address: str = ""
    script: Sequence[Delta] = (Delta(token_ids=bytes(4), text="a", finish=FINISH_REASON_LENGTH),)
    submits: list[Submit] = field(default_factory=list)
    updates: asyncio.Queue[CacheUpdate] = field(default_factory=asyncio.Queue)
    server: grpc.aio.Server = field(init=False)

    def report(self, *paths: Sequence[int]) -> None:
        """A snapshot with a path of block keys for each rank."""
        self.hold(*(Run(keys=keys, rank=rank) for rank, keys in enumerate(paths)))

    def hold(self, *runs: Run) -> None:
        """A snapshot with these runs."""
        update = CacheUpdate(epoch=EPOCH, snapshot=Snapshot(runs=runs, last=True))
        self.updates.put_nowait(update)

    async def Describe(self, request: DescribeRequest, context: Context) -> Description:
        return self.description

    async def Serve(self, frames: Any, context: Context) -> AsyncIterator[ServerFrame]:
        await context.send_initial_metadata(())
        async for frame in frames:
            assert isinstance(frame, ClientFrame)
            self.submits += frame.submit
            for step, said in enumerate(self.script):
                yield ServerFrame(deltas=[_delta(said, step, submit) for submit in frame.submit])

    async def WatchCache(
        self, request: WatchRequest, context: Context
    ) -> AsyncIterator[CacheUpdate]:
        while True:
            yield await self.updates.get()


def _delta(said: Delta, step: int, submit: Submit) -> Delta:
    delta = Delta(ticket=submit.ticket, cached_tokens=None if step else submit.predicted_tokens)
    delta.MergeFrom(said)
    return delta


@asynccontextmanager
async def told_replica(
    name: str = "", kind: type[ToldReplica] = ToldReplica, **changes: Any
) -> AsyncIterator[ToldReplica]:
    """A started one; `changes` are fields of its Description."""
    told = kind(
        Description(
            epoch=EPOCH,
            model=MODEL,
            tokenizer_fingerprint="ours",
            block_size=4,
            capacity_blocks=1000,
            max_context=4096,
            vocab_size=1000,
            ranks=1,
            key_check=key_check(),
        )
    )
    told.description.MergeFrom(Description(**changes))
    server = told.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_ReplicaServicer_to_server(told, server)
    serving = health.aio.HealthServicer()
    await serving.set("", HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    told.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    told.description.replica_id = name or told.address
    await server.start()
    try:
        yield told
    finally:
        await server.stop(0)


@asynccontextmanager
async def told_fleet(
    replicas: int = 2, **changes: Any
) -> AsyncIterator[tuple[Setup, list[ToldReplica]]]:
    """A router over replicas that report what they are told to."""
    async with AsyncExitStack() as stack, router([]) as fleet:
        told = [await stack.enter_async_context(told_replica(**changes)) for _ in range(replicas)]
        fleet.discovery.set(*(replica.address for replica in told))
        await eventually(lambda: len(fleet.fleet.ready(MODEL)) == replicas)
        yield fleet, told
