"""The RPCs of a replica, over any engine.

The engine thread hands each step to the event loop with one `call_soon_threadsafe`; everything here
runs on the loop, in the engine's order. Snapshots take the same way, so that a snapshot and the
deltas after it add up exactly.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from prometheus_client import Gauge

from hotbranch.keys import TOKEN_BYTES
from hotbranch.settings import EngineSettings
from hotbranch.v1 import cache_pb2, replica_pb2_grpc
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import CacheUpdate, WatchRequest
from hotbranch.v1.serve_pb2 import ClientFrame, Rejection, ServerFrame, Submit
from replicas.condition import LOADING, UNLOADED, Answer, Condition, wait
from replicas.engine import Engine, Namespace, Output, Step, StoredRun
from replicas.messages import invalid, to_delta, to_request, to_snapshot
from replicas.metrics import Metrics
from replicas.outbox import Outbox
from replicas.streams import Open, Stream

UPDATES = 4096  # a WatchCache stream may lag so many updates behind
LOAD_INTERVAL_S = 0.1
SHORTEST_LOAD_INTERVAL_S = 0.01
FOREVER_S = 1e6

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

Context = grpc.aio.ServicerContext[Any, Any]


def new_epoch() -> int:
    return secrets.randbits(63)


class Service(replica_pb2_grpc.ReplicaServicer):
    """The RPCs, and what the replica knows of its open requests and its cache.

    Until `attach` there is no engine, and all it answers is what it is.
    """

    def __init__(
        self, description: pb.Description, settings: EngineSettings, metrics: Metrics
    ) -> None:
        self.description = description
        self.condition = Condition(description, settings.step_timeout_s, lambda: len(self._open))
        self._engine: Engine
        self._max_waiting = settings.max_waiting
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._step = 0
        self._last_id = 0
        self._open: dict[int, Open] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._outboxes: set[Outbox] = set()
        self._watchers: set[Outbox] = set()  # those that have a snapshot
        self._sequence = 0
        self._turns: set[asyncio.Task[Answer]] = set()  # to sleep or to wake

    def attach(self, engine: Engine, description: pb.Description) -> None:
        """Serve an engine, which is not started yet; the description is what it is with it."""
        self._engine = engine
        self.description.CopyFrom(description)
        self._metrics.new_epoch(description.epoch)
        self.condition.attach(engine, self._loop.time())

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.Description:
        return self.description

    # The stubs want streams as generators; a coroutine that writes is gRPC's other form, and its
    # `finally` runs at once when the client goes.
    async def Serve(  # type: ignore[override]
        self, frames: AsyncIterable[ClientFrame], context: Context
    ) -> None:
        await self._loaded(context)
        stream = Stream(Outbox(limit=2))
        reader = asyncio.create_task(self._read(frames, stream))
        try:
            await self._write(stream.outbox, context, self._metrics.streams)
        finally:
            reader.cancel()
            self._abandon(stream)

    async def WatchCache(  # type: ignore[override]
        self, request: WatchRequest, context: Context
    ) -> None:
        await self._loaded(context)
        wish = request.load_interval_s
        interval_s = wish if SHORTEST_LOAD_INTERVAL_S < wish < LOAD_INTERVAL_S else LOAD_INTERVAL_S
        outbox = Outbox(UPDATES)
        # Not through a future: its waiter would wake up after the deltas that follow the snapshot.
        self._engine.snapshot(partial(self._post, self._join, outbox))
        self._report(outbox, interval_s, self._loop.time())
        try:
            await self._write(outbox, context, self._metrics.watchers)
        finally:
            self._watchers.discard(outbox)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        await self._loaded(context)
        if not 0 < request.ttl_s < math.inf:
            await context.abort(INVALID, f"ttl_s is {request.ttl_s}, not a time")
        namespace = await self._namespace(request, context)
        pinned = await wait(self._engine.pin(namespace, request.token_ids, request.ttl_s))
        if pinned is None:
            await context.abort(EXHAUSTED, "pins would hold more than a quarter of the pool")
        return pb.PinReply(pinned_blocks=pinned)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinReply:
        await self._loaded(context)
        namespace = await self._namespace(request, context)
        unpinned = await wait(self._engine.unpin(namespace, request.token_ids))
        return pb.UnpinReply(unpinned_blocks=unpinned)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        await self._loaded(context)
        return pb.DrainReply(unfinished=await self.drain(request.deadline_s))

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushReply:
        await self._loaded(context)
        await wait(self._engine.flush())
        renewed: asyncio.Future[None] = self._loop.create_future()
        self._engine.snapshot(partial(self._post, self._renew, renewed))
        await asyncio.shield(renewed)
        return pb.FlushReply(epoch=self.description.epoch)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepReply:
        await self._turn(self.condition.sleep(request.discard_weights), context)
        return pb.SleepReply(epoch=self.description.epoch)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeReply:
        await self._turn(self.condition.wake(), context)
        return pb.WakeReply()

    async def _turn(self, turn: Coroutine[Any, Any, Answer], context: Context) -> None:
        """Fall asleep or wake, to the end, though the caller may go; abort where that fails."""
        task = asyncio.create_task(turn)
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)
        code, problem = await asyncio.shield(task)
        if problem:
            await context.abort(code, problem)

    async def _loaded(self, context: Context) -> None:
        """Abort while there is no engine."""
        if self.description.state in UNLOADED:
            await context.abort(UNAVAILABLE, self.description.problem or LOADING)

    async def drain(self, deadline_s: float) -> int:
        """Refuse submissions and wait for the open requests; how many are left at the deadline."""
        self.description.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(min(deadline_s, FOREVER_S) if deadline_s > 0 else 0):
                await self._idle.wait()
        return len(self._open)

    def end_streams(self) -> None:
        """End every stream once what waits for it is written."""
        for outbox in self._outboxes:
            outbox.end()

    def emit(self, step: Step) -> None:
        """Take a step over; the engine calls this on its thread."""
        self._post(self._on_step, step)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *args)

    async def _write(self, outbox: Outbox, context: Context, gauge: Gauge) -> None:
        self._outboxes.add(outbox)
        try:
            with gauge.track_inprogress():
                await outbox.run(context.write)
        finally:
            self._outboxes.discard(outbox)
        if outbox.lost:
            await context.abort(EXHAUSTED, "the reader is too slow")

    async def _read(self, frames: AsyncIterable[ClientFrame], stream: Stream) -> None:
        async for frame in frames:
            if stream.outbox.lost:
                return
            refused = [no for submit in frame.submit if (no := self._submit(stream, submit))]
            if refused:
                self._reject(stream, *refused)
            for ticket in frame.cancel:
                if (id := stream.tickets.get(ticket)) is not None:
                    self._engine.cancel(id)
        stream.half_closed = True
        stream.end_if_done()

    def _submit(self, stream: Stream, submit: Submit) -> Rejection | None:
        """Hand a submission to the engine, or say why not."""
        reason, message = self._refusal(stream, submit)
        if message:
            return Rejection(ticket=submit.ticket, reason=reason, message=message)
        self._last_id = id = self._last_id + 1
        entry = Open(stream, submit.ticket, len(submit.token_ids) // TOKEN_BYTES, self._loop.time())
        if submit.deadline_s:
            delay_s = min(submit.deadline_s, FOREVER_S)
            entry.deadline = self._loop.call_later(delay_s, self._expire, id)
        stream.tickets[submit.ticket] = id
        self._open[id] = entry
        self._idle.clear()
        self._engine.submit(to_request(id, submit))
        return None

    def _refusal(self, stream: Stream, submit: Submit) -> tuple[Rejection.Reason, str]:
        if submit.ticket in stream.tickets:
            return Rejection.REASON_INVALID, f"ticket {submit.ticket} is already open"
        if message := invalid(submit, self.description):
            return Rejection.REASON_INVALID, message
        if self.description.draining:
            return Rejection.REASON_DRAINING, "the replica is draining"
        if self.description.state == pb.STATE_ASLEEP:
            return Rejection.REASON_DRAINING, "the replica is asleep"
        if submit.deadline_s < 0:
            return Rejection.REASON_DEADLINE, "the deadline had passed on arrival"
        if self.condition.sick:
            return Rejection.REASON_OVERLOADED, self.description.problem
        # The engine's own count of waiting requests lacks those submitted since its last step.
        if len(self._open) - self._engine.load().running >= self._max_waiting:
            return Rejection.REASON_OVERLOADED, f"{self._max_waiting} requests are waiting"
        return Rejection.REASON_UNSPECIFIED, ""

    def _reject(self, stream: Stream, *rejections: Rejection) -> None:
        for rejection in rejections:
            self._metrics.rejected(Rejection.Reason.Name(rejection.reason))
        self._send(stream, ServerFrame(step=self._step, rejections=rejections))

    def _send(self, stream: Stream, frame: ServerFrame) -> None:
        stream.send(frame)
        stream.end_if_done()
        if stream.outbox.lost:
            self._abandon(stream)

    def _expire(self, id: int) -> None:
        """The deadline of a request has passed before its first token."""
        if stream := self._open[id].stream:
            ticket = self._open[id].ticket
            del stream.tickets[ticket]
            self._release(id)
            reason, message = Rejection.REASON_DEADLINE, "no token before the deadline"
            self._reject(stream, Rejection(ticket=ticket, reason=reason, message=message))

    def _abandon(self, stream: Stream) -> None:
        for id in stream.tickets.values():
            self._release(id)
        stream.tickets.clear()

    def _release(self, id: int) -> None:
        """Nobody waits for this request any more."""
        entry = self._open[id]
        entry.stream = None
        entry.disarm()
        self._engine.cancel(id)

    def _on_step(self, step: Step) -> None:
        if step.wiped:
            self._begin_epoch(())
        if step.stored or step.evicted:
            self._publish(step)
        self._step = step.number
        now = self._loop.time()
        self.condition.stepped(now)
        frames: dict[Stream, ServerFrame] = {}
        for output in step.outputs:
            entry = self._open.get(output.id)
            if entry is None:  # an engine may answer what has been let go of
                continue
            entry.disarm()
            self._measure(entry, output, now)
            if stream := entry.stream:
                if stream not in frames:
                    frames[stream] = ServerFrame(step=step.number)
                if output.refused:
                    frames[stream].rejections.append(self._refused(entry.ticket, output.error))
                else:
                    frames[stream].deltas.append(to_delta(entry.ticket, output))
            if output.finish:
                del self._open[output.id]
                if stream:
                    del stream.tickets[entry.ticket]
        for stream, frame in frames.items():
            self._send(stream, frame)
        if not self._open:
            self._idle.set()

    def _refused(self, ticket: int, message: str) -> Rejection:
        """What the engine alone could see was wrong with a submission."""
        self._metrics.rejected(Rejection.Reason.Name(Rejection.REASON_INVALID))
        return Rejection(ticket=ticket, reason=Rejection.REASON_INVALID, message=message)

    def _measure(self, entry: Open, output: Output, now: float) -> None:
        metrics = self._metrics
        if output.tokens and not entry.started:
            metrics.ttft.observe(now - entry.last)
            metrics.prompt_tokens.inc(entry.prompt_tokens)
            metrics.cached_tokens.inc(output.cached_tokens or 0)
            entry.started = True
        elif output.tokens:
            metrics.gap.observe(now - entry.last)
        entry.last = now
        metrics.generated_tokens.inc(len(output.tokens))
        if output.finish:
            metrics.finished(output.finish)

    def _publish(self, step: Step) -> None:
        self._sequence += 1
        self._metrics.sequence.set(self._sequence)
        update = CacheUpdate(epoch=self.description.epoch)
        update.delta.sequence = self._sequence
        for run in step.stored:
            update.delta.stored.add(parent=run.parent, keys=run.keys, rank=run.rank, tier=run.tier)
        for gone in step.evicted:
            update.delta.evicted.add(keys=gone.keys, rank=gone.rank, tier=gone.tier)
        for watcher in self._watchers:
            watcher.put(update)

    def _join(self, outbox: Outbox, runs: Sequence[StoredRun]) -> None:
        """The engine took a snapshot for a watcher: the deltas from here on follow it."""
        if not outbox.closed:
            self._watchers.add(outbox)
            outbox.put_lazily(to_snapshot(runs, self.description.epoch, self._sequence))

    def _report(self, outbox: Outbox, interval_s: float, due: float) -> None:
        if not outbox.closed:
            outbox.put_lazily(self._load_report(self.description.epoch))
            due = max(due + interval_s, self._loop.time())
            self._loop.call_at(due, self._report, outbox, interval_s, due)

    def _load_report(self, epoch: int) -> Iterator[CacheUpdate]:
        """A load report, as of when it is written."""
        load = cache_pb2.Load(**asdict(self._engine.load()))
        yield CacheUpdate(epoch=epoch, load=load)

    def _renew(self, renewed: asyncio.Future[None], runs: Sequence[StoredRun]) -> None:
        self._begin_epoch(runs)
        renewed.set_result(None)

    def _begin_epoch(self, runs: Sequence[StoredRun]) -> None:
        """Start a new epoch at a snapshot; every watcher gets it."""
        self.description.epoch = new_epoch()
        self._sequence = 0
        self._metrics.new_epoch(self.description.epoch)
        for watcher in self._watchers:
            watcher.put_lazily(to_snapshot(runs, self.description.epoch, 0))

    async def _namespace(
        self, request: pb.PinRequest | pb.UnpinRequest, context: Context
    ) -> Namespace:
        space = request.namespace
        if space.model != self.description.model:
            await context.abort(INVALID, f"model {space.model!r} is not served here")
        if len(request.token_ids) % TOKEN_BYTES:
            await context.abort(INVALID, "token_ids is not a multiple of 4 bytes")
        return Namespace(space.model, space.adapter, space.salt)
