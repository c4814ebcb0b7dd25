"""The far ends of a replica's streams: a client of Serve, and the view of a WatchCache reader."""

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from gated_replica import MODEL, PATIENCE_S, Replica, store

from hotbranch.v1.cache_pb2 import CacheUpdate
from hotbranch.v1.serve_pb2 import ClientFrame, Delta, Rejection, Sampling, ServerFrame, Submit


def submit(ticket: int, tokens: Iterable[int] = range(10), **changes: Any) -> Submit:
    ids = [*tokens]
    request = Submit(ticket=ticket, model=MODEL, token_ids=struct.pack(f"<{len(ids)}I", *ids))
    request.sampling.max_tokens = 4
    request.MergeFrom(Submit(**changes))
    return request


def endless(ticket: int, **changes: Any) -> Submit:
    """Runs on until the context ends, far beyond any test."""
    return submit(ticket, sampling=Sampling(max_tokens=4000), **changes)


class Client:
    """One Serve stream, with what came down it."""

    def __init__(self, replica: Replica) -> None:
        self.call = replica.stub.Serve()
        self.frames: list[ServerFrame] = []

    async def send(self, *submissions: Submit, cancel: Iterable[int] = ()) -> None:
        await self.call.write(ClientFrame(submit=submissions, cancel=cancel))

    async def read(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not enough():
                frame = await self.call.read()
                assert frame is not grpc.aio.EOF, await self.call.details()
                self.frames.append(frame)

    async def read_more(self) -> None:
        seen = len(self.frames)
        await self.read(lambda: len(self.frames) > seen)

    async def finish(self, *tickets: int) -> None:
        await self.read(lambda: all(self.ended(ticket) for ticket in tickets))

    async def refused(self, ticket: int) -> Rejection:
        await self.read(lambda: bool(self.rejections(ticket)))
        return self.rejections(ticket)[-1]

    def rejections(self, ticket: int) -> list[Rejection]:
        return [r for frame in self.frames for r in frame.rejections if r.ticket == ticket]

    def deltas(self, ticket: int) -> list[Delta]:
        return [d for frame in self.frames for d in frame.deltas if d.ticket == ticket]

    def ended(self, ticket: int) -> bool:
        return any(delta.finish for delta in self.deltas(ticket))

    def tokens(self, ticket: int) -> bytes:
        return b"".join(delta.token_ids for delta in self.deltas(ticket))


class View:
    """What a router builds from a WatchCache stream; the contract's rules are asserted."""

    def __init__(self) -> None:
        self.blocks: dict[int, int | None] = {}
        self.epoch = -1
        self.sequence = -1
        self.loads = 0
        self.snapshots = 0
        self.largest_message = 0
        self._whole = True

    def apply(self, update: CacheUpdate) -> None:
        kind = update.WhichOneof("update")
        if kind == "snapshot":
            if self._whole:
                self.blocks.clear()
                assert update.epoch != self.epoch
                self.epoch, self._whole = update.epoch, False
            for run in update.snapshot.runs:
                store(self.blocks, run.parent if run.HasField("parent") else None, run.keys)
            self.largest_message = max(
                self.largest_message, sum(len(run.keys) for run in update.snapshot.runs)
            )
            if update.snapshot.last:
                self._whole, self.sequence = True, update.snapshot.sequence
                self.snapshots += 1
            return
        if kind == "load":
            self.loads += 1
            return
        assert self._whole
        assert update.epoch == self.epoch
        assert update.delta.sequence == self.sequence + 1
        self.sequence += 1
        for run in update.delta.stored:
            store(self.blocks, run.parent if run.HasField("parent") else None, run.keys)
        for evicted in update.delta.evicted:
            for key in evicted.keys:
                del self.blocks[key]

    async def follow(self, call: Any) -> None:
        async for update in call:
            self.apply(update)


async def lost(call: Any) -> grpc.StatusCode:
    """The status of a stream, read to its end."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK
