"""The replica process: listen, load the engine, serve it, and stop when asked to."""

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
from functools import partial
from typing import NoReturn

import uvloop

from hotbranch.keys import key_check
from hotbranch.settings import ReplicaSettings
from replicas.engine import Engine, Fault, StartError
from replicas.server import FAULT_SHOWN_S, Build, ReplicaServer, check_ports

DRAIN_S = 30.0
FAILED = 1  # exit status of an engine that has failed, be it at start
UNUSABLE = 2  # of settings that cannot work here, as of wrong flags
STATUSES = {
    Fault.MODEL_NOT_FOUND: UNUSABLE,
    Fault.BAD_SETTINGS: UNUSABLE,
    Fault.OUT_OF_MEMORY: 3,
    Fault.START_FAILED: FAILED,
}

log = logging.getLogger(__name__)


def run(settings: ReplicaSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    0 after a stop, 1 when the engine failed for good, 2 when the settings cannot work here, 3 when
    the memory does not suffice. The first signal lets open requests finish for up to 30 seconds,
    the second one does not wait.
    """
    try:
        check_ports(settings)
        key_check()
    except (OSError, ValueError) as error:
        return _complain(error, UNUSABLE)
    server = ReplicaServer(settings)
    status = uvloop.run(_run(server, partial(build, settings)))
    if server.abandoned:
        _exit(status)
    return status


def build(settings: ReplicaSettings) -> tuple[Engine, str, str]:
    """See `replicas.build.build_engine`."""
    from replicas.build import build_engine  # only now: torch takes seconds

    return build_engine(settings)


def _exit(status: int) -> NoReturn:
    """End at once: Python would wait for native code on the thread left behind, or crash in it."""
    for child in multiprocessing.active_children():  # of an engine
        child.kill()
    logging.shutdown()
    os._exit(status)


async def _run(server: ReplicaServer, build: Build) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    try:
        await server.start()
    except OSError as error:
        return _complain(error, UNUSABLE)
    asked = asyncio.create_task(signals.get())
    try:
        status = await _load(server, build, asked)
        return await _serve(server, signals, asked) if status is None else status
    finally:
        await server.stop(0)


async def _load(server: ReplicaServer, build: Build, asked: asyncio.Task[int]) -> int | None:
    """Load the engine. The exit status where it cannot be loaded, or when asked to stop before."""
    log.info("loading on %s, metrics on %s", server.address, server.metrics_address)
    loading = asyncio.create_task(server.load(build))
    await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return 0
    try:
        loading.result()
    except StartError as error:
        status = _complain(error, STATUSES[error.fault])
        await asyncio.wait((asked,), timeout=FAULT_SHOWN_S)
        return status
    return None


async def _serve(
    server: ReplicaServer, signals: asyncio.Queue[int], asked: asyncio.Task[int]
) -> int:
    log.info(
        "serving %s on %s, metrics on %s", server.model, server.address, server.metrics_address
    )
    failure = asyncio.create_task(server.failure())
    await asyncio.wait((failure, asked), return_when=asyncio.FIRST_COMPLETED)
    if failure.done():
        log.error("the engine has failed: %s", failure.result())
        return FAILED
    log.info("draining for up to %.0f s", DRAIN_S)
    drained = asyncio.create_task(server.drain(DRAIN_S))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((failure, drained, again), return_when=asyncio.FIRST_COMPLETED)
    return 0


def _complain(error: Exception, status: int) -> int:
    print(f"hotbranch replica: {error}", file=sys.stderr)
    return status
