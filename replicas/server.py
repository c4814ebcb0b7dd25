"""A replica on the network: its service, health, reflection and metrics."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hotbranch import __version__
from hotbranch.keys import key_check
from hotbranch.ports import free_address
from hotbranch.settings import ReplicaSettings
from hotbranch.states import NAMES
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1 import replica_pb2_grpc
from replicas.engine import Engine, Facts, Fault, Load, StartError
from replicas.metrics import Metrics
from replicas.service import Service, new_epoch

SERVICE = pb.DESCRIPTOR.services_by_name["Replica"].full_name
HEALTH_INTERVAL_S = 0.1
GIVE_UP_S = 5.0  # an engine that stays dead or hangs for so long does not come back
FAULT_SHOWN_S = 2.0  # that a process lives to tell why it has no engine: for routers and scrapes
ENGINE_STOP_S = 5.0  # for the engine to end its current step when the server stops
CLOSE_S = 1.0  # for streams to take their last frames when the server stops

OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two replicas could share a port and split its connections
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
)

T = TypeVar("T")
Build = Callable[[], tuple[Engine, str, str]]

log = logging.getLogger(__name__)


def check_ports(settings: ReplicaSettings) -> None:
    """Raise OSError, naming the address, when a port is taken: known before weights are loaded."""
    for port in (settings.grpc_port, settings.metrics_port):
        free_address(settings.host, port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _listening(address: str) -> Iterator[None]:
    """Name the address in whatever goes wrong."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises RuntimeError
        raise OSError(f"cannot listen on {address}: {error}") from error


class ReplicaServer:
    """A replica on the network: the service, health, reflection and metrics over one engine.

    It lives on the event loop that calls `start`, and installs no signal handlers.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self.address = ""  # host:port, known once started
        self.metrics_address = ""
        self.abandoned = False  # whether a thread was left behind in the middle of its work
        self._settings = settings
        self._engine: Engine | None = None
        self._description = pb.Description(
            model=settings.served_name or Path(settings.model).expanduser().resolve().name,
            engine=settings.engine,
            state=pb.STATE_LOADING,
        )

    @property
    def model(self) -> str:
        """The name it is served under."""
        return self._description.model

    @property
    def state(self) -> str:
        """Of the states of the contract, by its name in metrics."""
        return NAMES[self._description.state]

    async def start(self) -> None:
        """Listen. Raises OSError, naming the address, when a port is taken."""
        settings, host, here = self._settings, self._settings.host, self._description
        check_ports(settings)  # gRPC would explain a failure on stderr, in its own words
        self._metrics = Metrics(here)
        self._server = grpc.aio.server(options=OPTIONS)
        try:
            with _listening(address := _address(host, settings.grpc_port)):
                self.address = _address(host, self._server.add_insecure_port(address))
            with _listening(_address(host, settings.metrics_port)):
                self._scrapes = self._metrics.serve(host, settings.metrics_port)
            self.metrics_address = _address(host, self._scrapes.server_port)
        except OSError:
            await self._server.stop(0)
            raise
        here.replica_id = settings.replica_id or self.address
        self._service = Service(here, settings, self._metrics)
        self._health = health.aio.HealthServicer()
        replica_pb2_grpc.add_ReplicaServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._tell_health()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._server.start()

    async def load(self, build: Build) -> None:
        """Have a thread build the engine, then serve it.

        `build` returns the engine, not yet started, the name its model is served under, and the
        fingerprint. Raises StartError, with the state that tells of it.
        """
        try:
            engine, model, fingerprint = await _on_a_thread(build)
            full = self._describe(engine.facts, model, fingerprint)
            engine.start(self._service.emit)
        except asyncio.CancelledError:
            self.abandoned = True
            raise
        except Exception as error:
            fault = error if isinstance(error, StartError) else _unforeseen(error)
            self._service.condition.fail(fault)
            raise fault from None
        self._engine = engine
        self._service.attach(engine, full)
        self._metrics.attach(full, engine.load)
        await self._tell_health()

    def engine_load(self) -> Load:
        """How busy the engine is, once there is one."""
        assert self._engine
        return self._engine.load()

    async def failure(self) -> str:
        """Return, with the reason, once the engine has failed for good."""
        return await asyncio.shield(self._failure)

    async def drain(self, deadline_s: float) -> int:
        """Refuse submissions, wait for the open requests; how many are left at the deadline."""
        return await self._service.drain(deadline_s)

    async def stop(self, grace_s: float) -> None:
        """Drain for at most `grace_s`, then end what is left, the engine and the streams.

        Takes a few seconds beyond `grace_s` at most: an engine that hangs is left behind.
        """
        await self.drain(grace_s)
        await self._stop_engine()
        self._service.end_streams()
        await self._server.stop(CLOSE_S)
        self._supervisor.cancel()
        await asyncio.to_thread(self._scrapes.shutdown)
        self._scrapes.server_close()

    async def _stop_engine(self) -> None:
        if self._engine is None:
            return
        # On a daemon thread, for which neither the loop nor the process waits when they end.
        stopper = threading.Thread(target=self._engine.stop, name="engine-stop", daemon=True)
        stopper.start()
        await asyncio.to_thread(stopper.join, ENGINE_STOP_S)
        self.abandoned = stopper.is_alive()
        if self.abandoned:
            log.error("the engine hangs in a step; it is left behind")

    def _describe(self, facts: Facts, model: str, fingerprint: str) -> pb.Description:
        return pb.Description(
            replica_id=self._description.replica_id,
            epoch=new_epoch(),
            model=model,
            tokenizer_fingerprint=fingerprint,
            block_size=facts.block_size,
            capacity_blocks=facts.capacity_blocks,
            max_context=facts.max_context,
            vocab_size=facts.vocab_size,
            engine=facts.engine,
            ranks=facts.ranks,
            metrics_address=self.metrics_address,
            version=__version__,
            key_check=key_check(),
            chunk_tokens=facts.chunk_tokens,
            adapters=facts.adapters,
            structures=facts.structures,
            parses=facts.parses,
        )

    async def _supervise(self) -> None:
        """Follow the state of the engine, and tell those who ask."""
        loop = asyncio.get_running_loop()
        condition, sick_since = self._service.condition, math.inf
        while not self._failure.done():  # what it has failed of stays told
            condition.look(loop.time())
            sick_since = min(sick_since, loop.time()) if condition.sick else math.inf
            if loop.time() - sick_since >= GIVE_UP_S:
                self._failure.set_result(self._description.problem)
            await self._tell_health()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _tell_health(self) -> None:
        here, reply = self._description, health_pb2.HealthCheckResponse
        serving = here.state == pb.STATE_SERVING and not here.draining
        for name in ("", SERVICE):
            await self._health.set(name, reply.SERVING if serving else reply.NOT_SERVING)


async def _on_a_thread(work: Callable[[], T]) -> T:
    """Not one of asyncio's threads: for a daemon neither the loop nor the process waits."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="engine-build", daemon=True).start()
    return await asyncio.wrap_future(done)


def _unforeseen(error: Exception) -> StartError:
    log.error("the engine cannot be built", exc_info=error)
    reason = str(error).strip().partition("\n")[0]
    return StartError(Fault.START_FAILED, f"{type(error).__name__}: {reason}")
