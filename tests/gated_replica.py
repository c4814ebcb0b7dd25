"""A replica without a model: a runner that a test can hold still, and text without a tokenizer."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from ledger_runner import LedgerRunner

from hotbranch.settings import ReplicaSettings
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from replicas.engine import StoredRun
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.radix.sequence import Chunk, Sampled
from replicas.server import ReplicaServer

MODEL = "ledger"
VOCABULARY = 1000
BLOCK = 4
PATIENCE_S = 20.0


class GatedRunner(LedgerRunner):
    """Runs a step only while its gate is open: a closed gate is a long step."""

    def __init__(self, blocks: int, block_size: int = BLOCK) -> None:
        super().__init__(blocks, block_size, VOCABULARY)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken = False
        self.singly = False  # the gate closes behind each step
        self.pace_s = 0.0

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        self.entered.set()
        self.gate.wait(PATIENCE_S)
        if self.singly:
            self.gate.clear()
        if self.pace_s:  # a sleep of 0 yields too, and the router sees what a step costs
            time.sleep(self.pace_s)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().run(chunks)


@dataclass
class Letters:
    """`width` letters a token, no stop strings."""

    width: int

    def push(self, token: int) -> tuple[str, str | None]:
        return chr(97 + token % 26) * self.width, None

    def flush(self) -> str:
        return ""


@dataclass
class Replica:
    """A started server, its engine's insides, and a client's channel to it."""

    server: ReplicaServer
    engine: RadixEngine
    runner: GatedRunner
    channel: grpc.aio.Channel
    stub: Any = field(init=False)  # the stub's own types are those of synchronous calls

    def __post_init__(self) -> None:
        self.stub = ReplicaStub(self.channel)

    async def cached(self) -> dict[int, int | None]:
        """What the engine holds in truth: key -> parent, None at a root."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Iterable[StoredRun]] = loop.create_future()

        def take(runs: Iterable[StoredRun]) -> None:
            loop.call_soon_threadsafe(reply.set_result, runs)

        self.engine.snapshot(take)
        view: dict[int, int | None] = {}
        for run in await reply:
            store(view, run.parent, run.keys)
        return view


@asynccontextmanager
async def replica(
    width: int = 1, engine_type: type[RadixEngine] = RadixEngine, **options: Any
) -> AsyncIterator[Replica]:
    settings = ReplicaSettings(**{"block_size": BLOCK, "kv_tokens": 2048, **options})
    runner = GatedRunner(settings.kv_tokens // BLOCK)
    limits = Limits.of(settings, max_context=4096)
    engine = engine_type(limits, runner, frozenset(), lambda request: Letters(width), VOCABULARY)
    server = ReplicaServer(settings)
    await server.start()
    await server.load(lambda: (engine, MODEL, "fingerprint"))
    try:
        async with connect(server) as channel:
            yield Replica(server, engine, runner, channel)
    finally:
        runner.gate.set()
        await server.stop(0)


def connect(server: ReplicaServer) -> grpc.aio.Channel:
    """A connection of its own, with a small window, so that a reader that stops is soon noticed."""
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.lookahead_bytes", 4096),
        ("grpc.http2.bdp_probe", 0),
    )
    return grpc.aio.insecure_channel(server.address, options=options)


def store(view: dict[int, int | None], parent: int | None, keys: Iterable[int]) -> None:
    for key in keys:
        assert parent is None or parent in view
        assert key not in view
        view[key] = parent
        parent = key


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def busy(replica: Replica) -> int:
    load = replica.engine.load()
    return load.running + load.waiting
