"""Replicas and routers between which cache streams run, real ones, that go wrong by a script.

The script and the streams go in lockstep: what a replica lets through is applied before anything
else happens. So a seed decides all, however many worlds share the event loop.
"""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any

import grpc
from chaos_replica import KEYS, LEAVES, LONGEST, Held, Path, Replica, closed, keys, prefixes

from hotbranch.v1 import replica_pb2_grpc as rpc
from hotbranch.v1.cache_pb2 import TIER_CPU, TIER_DISK, CacheUpdate, Load, WatchRequest
from router.fleet.holder import Holder
from router.fleet.watch import watch_cache
from router.index.index import Index
from router.index.view import View

FAULTS = ("drop", "duplicate", "delay", "hurry")
# How a stream ends, and what becomes of the view.
CUTS = {
    grpc.StatusCode.OK: "ended",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overflow",
    grpc.StatusCode.UNAVAILABLE: "broken",  # the connection
}

Context = grpc.aio.ServicerContext[Any, Any]
Outlet = asyncio.Queue[CacheUpdate | grpc.StatusCode]


class Exchange(rpc.ReplicaServicer):
    """The far end of every stream, whose name its metadata has."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}

    async def WatchCache(  # type: ignore[override]
        self, request: WatchRequest, context: Context
    ) -> None:
        name = str(dict(context.invocation_metadata() or ())["wire"])
        outlet = Outlet()
        self.wires[name].arrivals.put_nowait(outlet)
        while isinstance(item := await outlet.get(), CacheUpdate):
            await context.write(item)
        if item is not grpc.StatusCode.OK:
            await context.abort(item)


class Witness(View):
    """A view that tells what became of every message ("", or what it was lost to), and checks it.

    A current view equals what the replica held at that number; another epoch clears it; one that is
    lost keeps what it had.
    """

    def __init__(self, index: Index, replica: Replica) -> None:
        super().__init__(index, replica.address, Counter())
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        self._replica = replica
        self._seen: tuple[int, int] | None = None  # the last epoch and number
        self._reported: Held = []  # empty until a snapshot is complete

    def apply(self, update: CacheUpdate, now: float) -> None:
        another = self._seen is not None and self._seen[0] != update.epoch
        number = self._seen[1] if self._seen else 0
        if not update.HasField("load"):
            number = (update.delta if update.HasField("delta") else update.snapshot).sequence
        self._seen = update.epoch, number
        try:
            super().apply(update, now)
        finally:
            self._check(another)
        self.outcomes.put_nowait("")

    def lost(self, reason: str) -> None:
        super().lost(reason)
        self.outcomes.put_nowait(reason)

    def broken(self) -> None:
        """What `Link` does with a connection that broke, and once it is there again."""
        self.forget()
        assert not any(self._held())
        self._seen, self._reported = None, []
        self.connected(self._replica.description, comparable=True)
        self.outcomes.put_nowait("broken")

    def _check(self, another: bool) -> None:
        held = self._held()
        if another:
            assert self.current or not any(held)
            self._reported = [frozenset()] * len(self._reported)
        if self.current:
            assert self._seen
            self._reported = self._replica.history[self._seen]
        if self._reported:
            assert held == self._reported

    def _held(self) -> Held:
        return [self._index.held(holder) for holder in self._replica.holders]


class Wire:
    """The streams from a replica into a router's view, one after the other.

    gRPC keeps a stream whole and in order. What is broken here, at the replica's end, is each
    delta's place in it: a slip on either side must show in the sequence number. Snapshot messages
    carry none, so they stay whole.
    """

    def __init__(self, replica: Replica, index: Index, rng: random.Random) -> None:
        self.replica = replica
        self.view = Witness(index, replica)
        self.faults: dict[str, float] = {}
        self.stream: deque[CacheUpdate] | None = None  # not let through yet; None: not watching
        self.arrivals: asyncio.Queue[Outlet] = asyncio.Queue()
        self.trace: list[tuple[int, str]] = []  # messages, and what ended them
        self._outlet = Outlet()
        self._late: list[CacheUpdate] = []
        self._rng = rng
        replica.tell.append(self.send)

    async def follow(self, stub: "rpc.ReplicaAsyncStub") -> None:
        """The router's end: what `Link` does, without its pauses."""
        self.view.connected(self.replica.description, comparable=True)
        while True:
            try:
                await watch_cache(stub, self.view, lambda load: None, self.replica.address)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.view.broken()

    async def watch(self) -> None:
        """Wait for the router to watch, and take a snapshot for it."""
        self._outlet = await self.arrivals.get()
        self.stream = deque(self.replica.snapshot())
        self._late = []
        self.trace.append((0, ""))

    def send(self, update: CacheUpdate) -> None:
        """Something leaves the replica; if it is a delta, what the faults allow becomes of it."""
        if self.stream is None:
            return
        late, self._late = self._late, []
        fault = ""
        if update.HasField("delta") and self._rng.random() < sum(self.faults.values()):
            fault = self._rng.choices(list(self.faults), list(self.faults.values()))[0]
        if fault == "hurry":
            self.stream.insert(self._rng.randint(0, len(self.stream)), update)
        elif fault not in ("drop", "delay"):
            self.stream.append(update)
        if fault in ("duplicate", "delay"):
            self._late.append(update)
        self.stream.extend(late)

    def snapshot_again(self) -> None:
        """A snapshot on the same stream. What was delayed comes after it."""
        if self.stream is not None:
            self.stream.extend([*self.replica.snapshot(), *self._late])
            self._late = []

    async def receive(self, count: int = 1) -> None:
        """Let some messages through; those behind one that costs the view are in vain."""
        if not self.stream:
            return
        count = min(count, len(self.stream))
        for _ in range(count):
            self._outlet.put_nowait(self.stream.popleft())
        for number in range(count):
            if outcome := await self.view.outcomes.get():
                self.trace.append((number, outcome))
                self.stream = None
                return
        self.trace.append((count, ""))

    async def receive_all(self) -> None:
        while self.stream:
            await self.receive(len(self.stream))

    async def cut(self) -> None:
        """The stream ends, and what is under way in it never arrives."""
        if self.stream is not None:
            self.stream = None
            code = self._rng.choice(list(CUTS))
            self._outlet.put_nowait(code)
            outcome = await self.view.outcomes.get()
            assert outcome == CUTS[code]
            self.trace.append((0, outcome))

    async def settle(self) -> None:
        """All arrives in order; one watch more, if the view was lost, must be enough."""
        self.faults = {}
        await self.receive_all()
        if self.stream is None:
            await self.watch()
            await self.receive_all()
        assert self.stream is not None
        assert self.view.current


class World:
    """Replicas, of which the first has two ranks, and routers that each watch all of them."""

    def __init__(self, seed: int, replicas: int, routers: int, fault: float = 0.0) -> None:
        self.rng = rng = random.Random(seed)
        self.replicas = [Replica(rng, f"r{i}", ranks=2 if i == 0 else 1) for i in range(replicas)]
        self.indexes = [Index() for _ in range(routers)]
        self.wires = [
            Wire(replica, index, rng) for index in self.indexes for replica in self.replicas
        ]
        for wire in self.wires:
            wire.faults = dict.fromkeys(FAULTS, fault / len(FAULTS))

    async def begin(self) -> None:
        """Every replica has something in its cache, and every router knows it."""
        for wire in self.wires:
            await wire.watch()
        for replica in self.replicas:
            while not all(len(held) > 4 for held in replica.held()):
                replica.step()
        for wire in self.wires:
            await wire.receive_all()

    async def chaos(self, events: int) -> None:
        """So many random events, then quiet."""
        for wire in self.wires:
            await wire.watch()
        for _ in range(events):
            await self.event()
        await self.quiet()

    async def event(self) -> None:
        rng = self.rng
        replica = rng.choice(self.replicas)
        wires = [wire for wire in self.wires if wire.replica is replica]
        kind = rng.choices(
            ("step", "receive", "predict", "load", "cut", "flush", "restart", "rebirth", "again"),
            (40, 36, 8, 4, 4, 2, 2, 1, 3),
        )[0]
        if kind == "step":
            replica.step()
        elif kind == "predict":
            self.predict(rng.choice(self.indexes), replica)
        elif kind == "cut":
            await rng.choice(wires).cut()
        elif kind in ("flush", "restart", "rebirth"):  # of a rebirth only the epoch tells
            replica.begin()
        for wire in wires:
            if kind == "receive" and wire.stream is None:
                await wire.watch()
            elif kind == "receive":
                await wire.receive(rng.randint(1, 6))
            elif kind == "load":
                wire.send(CacheUpdate(epoch=replica.epoch, load=Load(running=1)))
            elif kind in ("flush", "again"):
                wire.snapshot_again()
            elif kind == "restart":
                await wire.cut()

    def predict(self, index: Index, replica: Replica) -> None:
        """A prompt goes to a replica; at times it never runs, or finds less than was thought."""
        holder, now = self.rng.choice(replica.holders), time.monotonic()
        path = keys(self.rng.choice(LEAVES))
        index.predict(holder, path, now)
        sequel = self.rng.randrange(3)
        if sequel == 1:
            index.withdraw(holder, path)
        elif sequel == 2:
            index.missed(holder, path, self.rng.randint(0, LONGEST), now)

    async def quiet(self) -> None:
        """A dropped last delta shows at the next one, so every replica says one thing more."""
        await asyncio.gather(*(wire.settle() for wire in self.wires))
        for replica in self.replicas:
            replica.step()
        await asyncio.gather(*(wire.settle() for wire in self.wires))
        self.check()
        for replica in self.replicas:
            replica.shed()
        await asyncio.gather(*(wire.settle() for wire in self.wires))
        self.check()

    def check(self) -> None:
        """Every router's index is exact, once its predictions have ended."""
        held: dict[Holder, frozenset[int]] = {}
        matchable: dict[Holder, set[Path]] = {}
        for replica in self.replicas:
            held.update(zip(replica.holders, replica.held(), strict=True))
            matchable.update({holder: replica.matchable(holder.rank) for holder in replica.holders})
        paths = self.rng.sample(LEAVES, 20)
        for index in self.indexes:
            index.expire(inf)
            assert index.predicted_blocks == 0
            lower = [_below(index, holder) for holder in held]
            assert index.blocks == len(set().union(*matchable.values(), *lower))
            for holder, blocks in held.items():
                assert index.held(holder) == blocks
                assert index.held_count(holder) == len(blocks)
            for path in paths:
                match = index.match(keys(path))
                for holder, found in matchable.items():
                    assert match.depth(holder) == len(found.intersection(prefixes(path)))


def _below(index: Index, holder: Holder) -> set[Path]:
    """What can be matched of a rank's lower tiers, each with all that is above it."""
    found: set[Path] = set()
    for tier in (TIER_CPU, TIER_DISK):
        if blocks := index.held(holder._replace(tier=tier)):
            assert blocks >= index.held(holder)
            found |= closed(path for path, key in KEYS.items() if key in blocks)
    return found


class Site:
    """Where worlds run: one server on loopback, and one channel to it."""

    def __init__(self, exchange: Exchange, channel: grpc.aio.Channel) -> None:
        self._exchange = exchange
        self._channel = channel
        self._names = map(str, itertools.count())

    @asynccontextmanager
    async def running(self, world: World) -> AsyncIterator[World]:
        """A world whose routers watch. An error in one of their streams ends it."""
        async with asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(wire.follow(self._stub(wire))) for wire in world.wires]
            yield world
            for follower in followers:
                follower.cancel()

    def _stub(self, wire: Wire) -> "rpc.ReplicaAsyncStub":
        """A stub whose streams tell which wire they are of."""
        name = next(self._names)
        self._exchange.wires[name] = wire
        stub = rpc.ReplicaStub(self._channel)
        watch = partial(stub.WatchCache, metadata=(("wire", name),))
        stub.WatchCache = watch  # type: ignore[assignment]
        return stub


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    exchange = Exchange()  # type: ignore[abstract]
    server = grpc.aio.server()
    rpc.add_ReplicaServicer_to_server(exchange, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Site(exchange, channel)
    finally:
        await server.stop(None)
