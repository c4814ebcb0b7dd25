"""The replica process: load the engine, serve it, and stop when asked to."""

import asyncio
import logging
import signal
import sys

import uvloop

from hotbranch.embedded import ModelError
from hotbranch.keys import key_check
from hotbranch.settings import ReplicaSettings
from replicas.server import ReplicaServer, check_ports

DRAIN_S = 30.0
UNUSABLE = 2  # exit status of settings that cannot work here, as of wrong flags

log = logging.getLogger(__name__)


def run(settings: ReplicaSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    0 after a stop, 1 when the engine failed for good, 2 when the settings cannot work here. The
    first signal lets open requests finish for up to 30 seconds, the second one does not wait.
    """
    try:
        check_ports(settings)
        key_check()
        from replicas.build import build_engine  # only now: torch takes seconds

        engine, model, fingerprint = build_engine(settings)
    except (ModelError, OSError, ValueError) as error:
        return _unusable(error)
    return uvloop.run(serve(ReplicaServer(engine, settings, model, fingerprint), model))


def _unusable(error: Exception) -> int:
    print(f"hotbranch replica: {error}", file=sys.stderr)
    return UNUSABLE


async def serve(server: ReplicaServer, model: str) -> int:
    """Serve a loaded engine until it fails or a signal comes; the exit status."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    try:
        await server.start()
    except OSError as error:
        return _unusable(error)
    log.info("serving %s on %s, metrics on %s", model, server.address, server.metrics_address)

    failure = asyncio.create_task(server.failure())
    asked = asyncio.create_task(signals.get())
    await asyncio.wait((failure, asked), return_when=asyncio.FIRST_COMPLETED)
    if failure.done():
        log.error("the engine has failed: %s", failure.result())
        await server.stop(0)
        return 1
    log.info("draining for up to %.0f s", DRAIN_S)
    drained = asyncio.create_task(server.drain(DRAIN_S))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((failure, drained, again), return_when=asyncio.FIRST_COMPLETED)
    await server.stop(0)
    return 0
