"""One replica's WatchCache stream, followed for as long as the replica is connected."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from hotbranch.log import event
from hotbranch.v1.cache_pb2 import Load, WatchRequest
from router.fleet.watcher import ViewLost, Watcher

if TYPE_CHECKING:
    from hotbranch.v1.replica_pb2_grpc import ReplicaAsyncStub

log = logging.getLogger(__name__)

# A replica reports its load ten times a second. One that is stopped or wedged keeps its connection,
# and gRPC's own pings may be answered for it or not be sent at all.
SILENCE_S = 10.0
PAUSE_S = 0.1  # before a lost view is taken anew; twice as long each time it is lost again soon
LONGEST_PAUSE_S = 2.0


class Disconnected(Exception):
    """The other side ended a stream that should not end, or says nothing any more."""


async def watch_cache(
    stub: "ReplicaAsyncStub", watcher: Watcher, loaded: Callable[[Load], None], name: str
) -> None:
    """Hand every message on, and watch anew whenever the view is lost.

    Returns only when the replica has nothing to tell (UNIMPLEMENTED). Raises Disconnected, or
    AioRpcError when the connection broke. `name` is for the log.
    """
    pause_s = PAUSE_S
    while True:
        watcher.restart()
        began = time.monotonic()
        try:
            reason = await _follow(stub, watcher, loaded)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                event(log, "replica does not report", replica=name)
                return
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            reason = "overflow"
        watcher.lost(reason)
        event(log, "cache view lost", replica=name, reason=reason)
        lasted = time.monotonic() - began > LONGEST_PAUSE_S
        pause_s = PAUSE_S if lasted else min(2 * pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)


async def _follow(
    stub: "ReplicaAsyncStub", watcher: Watcher, loaded: Callable[[Load], None]
) -> str:
    """Follow one stream; why the view is lost."""
    loop = asyncio.get_running_loop()
    call = stub.WatchCache(WatchRequest())
    try:
        async with asyncio.timeout(SILENCE_S) as silence:
            async for update in call:
                silence.reschedule(loop.time() + SILENCE_S)
                if update.HasField("load"):
                    loaded(update.load)
                watcher.apply(update, time.monotonic())
        return "ended"
    except TimeoutError:
        raise Disconnected(f"the replica was silent for {SILENCE_S:g} s") from None
    except ViewLost as lost:
        return lost.reason
    finally:
        call.cancel()
