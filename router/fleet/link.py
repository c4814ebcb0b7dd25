"""One replica as the router reaches it: a connection, its streams, its state.

A link connects, asks what the replica is, opens one Serve and one WatchCache stream, and does so
again, after growing pauses, whenever the connection breaks. It carries requests and reports; it
decides nothing.
"""

import asyncio
import itertools
import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hotbranch.keys import key_check
from hotbranch.log import event
from hotbranch.states import NAMES
from hotbranch.v1 import replica_pb2_grpc
from hotbranch.v1.cache_pb2 import Load
from hotbranch.v1.replica_pb2 import STATE_SERVING, DescribeRequest, Description
from hotbranch.v1.serve_pb2 import ClientFrame, Delta, Rejection, ServerFrame, Submit
from router.fleet.holder import Holder
from router.fleet.outstanding import Outstanding
from router.fleet.watch import Disconnected, watch_cache
from router.fleet.watcher import Watcher

log = logging.getLogger(__name__)

CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]
FRAME_BYTES = 16 << 20  # of submissions in one frame, well below the largest message
DESCRIBE_TIMEOUT_S = 5.0
STATE_POLL_S = 0.5  # of a replica that does not serve yet
INCOMPARABLE = "its block keys differ from ours: its reports are not used"
MOST_RANKS = 1024  # a rank costs the index a bit in every set of holders
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class State(StrEnum):
    CONNECTING = "connecting"  # not reached yet, not serving yet, or lost
    READY = "ready"
    DRAINING = "draining"  # finishes what it has
    REFUSED = "refused"  # reached, but its model or tokenizer is not ours


class Receiver(Protocol):
    """Takes what comes back for the choices of one prompt."""

    def deliver(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        """(choice, delta) pairs of one engine step."""

    def reject(self, choice: int, rejection: Rejection) -> None:
        """The replica will not run this choice."""

    def lost(self, reason: str) -> None:
        """The connection broke: nothing more comes for any choice."""


class Link:
    """A replica by its address. `fingerprints` maps served names to our tokenizers'.

    `idle` is set while no request is open. `changed` is called when its state or its load has
    changed; when it is lost, before the receivers hear of it.
    """

    def __init__(
        self,
        address: str,
        fingerprints: Mapping[str, str],
        watcher: Watcher,
        changed: Callable[["Link"], None],
    ) -> None:
        self.address = address
        self.state = State.CONNECTING
        self.problem = ""
        self.reported_state = ""  # what the replica says of its engine; empty while not connected
        self.description: Description | None = None
        self.holders: list[Holder] = []  # its data-parallel ranks; none before it is described
        self.load: Load | None = None
        self.outstanding = Outstanding()
        self.watcher = watcher
        self._fingerprints = fingerprints
        self._tickets = itertools.count(1)
        self._open: dict[int, tuple[Receiver, int]] = {}
        self._outbox = ClientFrame()
        self._wake = asyncio.Event()
        self._closing = False
        self._changed = changed
        self.idle = asyncio.Event()
        self.idle.set()
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    @property
    def replica_id(self) -> str:
        return self.description.replica_id if self.description else self.address

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def submit(self, submits: Sequence[Submit], receiver: Receiver, uncached: int) -> list[int]:
        """Send the choices of one prompt; returns their tickets. Never blocks.

        `uncached` is the prefill in tokens that they need together.
        """
        tickets = []
        for choice, submit in enumerate(submits):
            submit.ticket = next(self._tickets)
            self._open[submit.ticket] = (receiver, choice)
            self._outbox.submit.append(submit)
            tickets.append(submit.ticket)
        self.idle.clear()
        self.outstanding.sent(tickets[0], uncached)
        self._wake.set()
        return tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        """Cancel what of `tickets` is open; nothing more is delivered for them."""
        for ticket in tickets:
            if ticket in self._open:
                self._end(ticket)
                self._outbox.cancel.append(ticket)
                self._wake.set()

    async def close(self) -> None:
        """Disconnect for good. Open requests are lost, the replica's blocks forgotten.

        Both before the first suspension, so that another link may have the address at once.
        """
        self._closing = True
        self._task.cancel()
        self._disconnected("closed")
        self.watcher.close()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while not self._closing:  # a task group with errors to raise swallows the cancellation
            began = time.monotonic()
            reason = ""
            try:
                async with grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS) as channel:
                    await self._session(channel)
            except* (grpc.aio.AioRpcError, Disconnected) as group:
                reason = _reason(group.exceptions[0])
            except* Exception as group:
                # A link without its task would keep its state and swallow every request.
                reason = _defect(group.exceptions[0])
                if not self._closing:
                    event(log, "link failed", logging.ERROR, replica=self.replica_id, reason=reason)
            if self._closing:
                return
            if reason and self.state is State.REFUSED:
                self.state, self.problem = State.CONNECTING, ""
            self._disconnected(reason or "refused")
            lasted = time.monotonic() - began
            failures = 0 if lasted > PAUSES_S[-1] else failures + 1
            await asyncio.sleep(
                PAUSES_S[min(failures, len(PAUSES_S) - 1)] * random.uniform(0.75, 1.25)
            )

    async def _session(self, channel: grpc.aio.Channel) -> None:
        stub = replica_pb2_grpc.ReplicaStub(channel)
        while (here := await self._describe(stub)).state != STATE_SERVING:
            self.state = State.CONNECTING
            self._has_problem(here.problem)
            await asyncio.sleep(STATE_POLL_S)
        if problem := self._mismatch(here):
            self.state = State.REFUSED
            self._has_problem(problem)
            return
        self.holders = [Holder(self.address, rank) for rank in range(here.ranks or 1)]
        self._has_problem(_problem(here))
        self.watcher.connected(here, _comparable(here))
        call = stub.Serve()
        await call.wait_for_connection()
        self.state = State.DRAINING if here.draining else State.READY
        event(log, "replica connected", replica=self.replica_id, address=self.address)
        self._changed(self)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(call))
            tasks.create_task(self._read(call))
            tasks.create_task(watch_cache(stub, self.watcher, self._loaded, self.replica_id))
            tasks.create_task(self._watch_health(channel, stub))

    async def _describe(self, stub: "replica_pb2_grpc.ReplicaAsyncStub") -> Description:
        """What the replica says of itself now."""
        self.description = await stub.Describe(DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        self.reported_state = NAMES.get(self.description.state, "unknown")
        return self.description

    def _has_problem(self, problem: str) -> None:
        """What is wrong now, or nothing. What is new is logged."""
        if problem and problem != self.problem:
            name = "replica refused" if self.state is State.REFUSED else "replica has a problem"
            event(log, name, replica=self.replica_id, state=self.reported_state, reason=problem)
        self.problem = problem

    def _mismatch(self, description: Description) -> str:
        ours = self._fingerprints.get(description.model)
        if ours is None:
            return f"it serves {description.model!r}, which this router does not know"
        if ours != description.tokenizer_fingerprint:
            return f"its tokenizer or chat template of {description.model!r} differs from ours"
        if not description.block_size or description.ranks > MOST_RANKS:
            return (
                f"it describes blocks of {description.block_size} tokens"
                f" and {description.ranks} ranks"
            )
        return ""

    async def _write(self, call: "grpc.aio.StreamStreamCall[ClientFrame, ServerFrame]") -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, self._outbox = self._outbox, ClientFrame()
            for part in _parts(frame):
                await call.write(part)

    async def _read(self, call: "grpc.aio.StreamStreamCall[ClientFrame, ServerFrame]") -> None:
        async for frame in call:
            self._deliver(frame)
        raise Disconnected("the replica ended the stream")

    def _deliver(self, frame: ServerFrame) -> None:
        groups: dict[Receiver, list[tuple[int, Delta]]] = {}
        for delta in frame.deltas:
            entry = self._open.get(delta.ticket)
            if entry is None:
                continue  # cancelled meanwhile
            receiver, choice = entry
            self.outstanding.settled(delta.ticket)
            if delta.finish:
                self._end(delta.ticket)
            groups.setdefault(receiver, []).append((choice, delta))
        for receiver, deltas in groups.items():
            receiver.deliver(deltas)
        for rejection in frame.rejections:
            entry = self._open.get(rejection.ticket)
            if entry is not None:
                self._end(rejection.ticket)
                receiver, choice = entry
                receiver.reject(choice, rejection)

    def _end(self, ticket: int) -> None:
        del self._open[ticket]
        self.outstanding.settled(ticket)
        if not self._open:
            self.idle.set()

    def _loaded(self, load: Load) -> None:
        self.load = load
        self.outstanding.reported(load.outstanding_tokens)
        self._changed(self)

    async def _watch_health(
        self, channel: grpc.aio.Channel, stub: "replica_pb2_grpc.ReplicaAsyncStub"
    ) -> None:
        checks: Any = health_pb2_grpc.HealthStub(channel)  # its stubs name no methods
        async for health in checks.Watch(health_pb2.HealthCheckRequest()):
            serving = health.status == health_pb2.HealthCheckResponse.SERVING
            if serving == (self.state is State.READY):
                continue
            self.state = State.READY if serving else State.DRAINING
            self._changed(self)
            self._has_problem(_problem(await self._describe(stub)))
        raise Disconnected("the replica ended its health stream")

    def _disconnected(self, reason: str) -> None:
        if self.state in (State.READY, State.DRAINING):
            event(log, "replica lost", replica=self.replica_id, reason=reason)
        if self.state is not State.REFUSED:
            self.state = State.CONNECTING
        self.load = None
        self.reported_state = ""
        self._changed(self)
        self.outstanding = Outstanding()
        self._outbox = ClientFrame()
        receivers = dict.fromkeys(receiver for receiver, _ in self._open.values())
        self._open.clear()
        self.idle.set()
        for receiver in receivers:
            receiver.lost(reason)
        self.watcher.forget()


def _comparable(here: Description) -> bool:
    return here.key_check == key_check()


def _problem(here: Description) -> str:
    return here.problem or ("" if _comparable(here) else INCOMPARABLE)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)


def _defect(error: BaseException) -> str:
    """What failed and where; the message of an unforeseen error may quote what it was given."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


def _parts(frame: ClientFrame) -> Iterator[ClientFrame]:
    """The frame in parts that fit a message; cancellations follow what they may cancel."""
    if frame.ByteSize() <= FRAME_BYTES:
        yield frame
        return
    part, size = ClientFrame(), 0
    for submit in frame.submit:
        if part.submit and size + submit.ByteSize() > FRAME_BYTES:
            yield part
            part, size = ClientFrame(), 0
        part.submit.append(submit)
        size += submit.ByteSize()
    part.cancel.extend(frame.cancel)
    yield part
