"""The RPCs of a replica, over any engine.

The engine thread hands each step to the event loop with one `call_soon_threadsafe`; everything here
runs on the loop, in the engine's order. Snapshots take the same way, so that a snapshot and the
deltas after it add up exactly.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from prometheus_client import Gauge

from hotbranch.keys import TOKEN_BYTES
from hotbranch.v1 import cache_pb2, replica_pb2_grpc
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import CacheUpdate, WatchRequest
from hotbranch.v1.serve_pb2 import ClientFrame, Rejection, ServerFrame, Submit
from replicas.engine import Engine, Namespace, Output, Step, StoredRun
from replicas.messages import invalid, to_delta, to_request, to_snapshot
from replicas.metrics import Metrics
from replicas.outbox import Outbox

DELTAS = 1 << 16  # and rejections that wait for one router, at most
UPDATES = 4096  # a WatchCache stream may lag so many updates behind
LOAD_INTERVAL_S = 0.1
SHORTEST_LOAD_INTERVAL_S = 0.01
FOREVER_S = 1e6

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNFIT = grpc.StatusCode.FAILED_PRECONDITION
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


def new_epoch() -> int:
    return secrets.randbits(63)


async def _wait(future: Future[T]) -> T:
    """Wait for the engine. Shielded: an engine need not expect that its futures are cancelled."""
    return await asyncio.shield(asyncio.wrap_future(future))


@dataclass(slots=True, eq=False)
class Stream:
    """A router's Serve stream. `tickets` maps its open requests to engine ids.

    What waits for the router is one frame: a reader that is slower than the engine gets the deltas
    of several steps at once, in order.
    """

    outbox: Outbox
    tickets: dict[int, int] = field(default_factory=dict)
    half_closed: bool = False
    waiting: ServerFrame | None = None

    def send(self, frame: ServerFrame) -> None:
        if self.waiting is None:
            self.waiting = frame
            self.outbox.put_lazily(self._take())
        else:
            self.waiting.MergeFrom(frame)
            if len(self.waiting.deltas) + len(self.waiting.rejections) > DELTAS:
                self.outbox.lost = True

    def _take(self) -> Iterator[ServerFrame]:
        """What waits, at the moment of writing."""
        frame, self.waiting = self.waiting, None
        if frame is not None:
            yield frame

    def end_if_done(self) -> None:
        if self.half_closed and not self.tickets:
            self.outbox.end()


@dataclass(slots=True, eq=False)
class Open:
    """A request in the engine. Without a stream, nobody waits for it any more."""

    stream: Stream | None
    ticket: int
    prompt_tokens: int
    last: float  # loop time of its last delta; before the first, of its receipt
    started: bool = False
    deadline: asyncio.TimerHandle | None = None

    def disarm(self) -> None:
        if self.deadline:
            self.deadline.cancel()
            self.deadline = None


class Service(replica_pb2_grpc.ReplicaServicer):
    """The RPCs, and what the replica knows of its open requests and its cache."""

    def __init__(
        self, engine: Engine, description: pb.Description, max_waiting: int, metrics: Metrics
    ) -> None:
        self.description = description
        self.fault = ""  # what is wrong with the engine
        self._engine = engine
        self._max_waiting = max_waiting
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
        self._metrics.new_epoch(description.epoch)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.Description:
        return self.description

    # The stubs want streams as generators; a coroutine that writes is gRPC's other form, and its
    # `finally` runs at once when the client goes.
    async def Serve(  # type: ignore[override]
        self, frames: AsyncIterable[ClientFrame], context: Context
    ) -> None:
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
        if not 0 < request.ttl_s < math.inf:
            await context.abort(INVALID, f"ttl_s is {request.ttl_s}, not a time")
        namespace = await self._namespace(request, context)
        pinned = await _wait(self._engine.pin(namespace, request.token_ids, request.ttl_s))
        if pinned is None:
            await context.abort(EXHAUSTED, "pins would hold more than a quarter of the pool")
        return pb.PinReply(pinned_blocks=pinned)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinReply:
        namespace = await self._namespace(request, context)
        unpinned = await _wait(self._engine.unpin(namespace, request.token_ids))
        return pb.UnpinReply(unpinned_blocks=unpinned)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        return pb.DrainReply(unfinished=await self.drain(request.deadline_s))

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushReply:
        await _wait(self._engine.flush())
        renewed: asyncio.Future[None] = self._loop.create_future()
        self._engine.snapshot(partial(self._post, self._renew, renewed))
        await asyncio.shield(renewed)
        return pb.FlushReply(epoch=self.description.epoch)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepReply:
        if self._open:
            await context.abort(UNFIT, f"{len(self._open)} requests are open")
        asleep = self._engine.sleep(request.discard_weights)
        if asleep is None:
            await context.abort(UNIMPLEMENTED, self._cannot("sleep"))
        self.description.state = pb.STATE_ASLEEP
        try:
            await _wait(asleep)
        except Exception as error:
            self.description.state = pb.STATE_SERVING
            await context.abort(UNFIT, str(error))
        return pb.SleepReply(epoch=self.description.epoch)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeReply:
        awake = self._engine.wake()
        if awake is None:
            await context.abort(UNIMPLEMENTED, self._cannot("sleep"))
        await _wait(awake)
        self.description.state = pb.STATE_SERVING
        return pb.WakeReply()

    def _cannot(self, what: str) -> str:
        return f"the {self.description.engine} engine cannot {what}"

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
        if self.fault:
            return Rejection.REASON_OVERLOADED, self.fault
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
