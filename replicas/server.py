"""A replica on the network: its service, health, reflection and metrics."""

import asyncio
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hotbranch import __version__
from hotbranch.keys import key_check
from hotbranch.ports import free_address
from hotbranch.settings import ReplicaSettings
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1 import replica_pb2_grpc
from replicas.engine import Engine
from replicas.metrics import Metrics
from replicas.service import Service, new_epoch

SERVICE = pb.DESCRIPTOR.services_by_name["Replica"].full_name
HEALTH_INTERVAL_S = 0.1
GIVE_UP_S = 5.0  # an engine that stays unhealthy for so long does not come back
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

    def __init__(
        self, engine: Engine, settings: ReplicaSettings, model: str, fingerprint: str
    ) -> None:
        self.address = ""  # host:port, known once started
        self.metrics_address = ""
        self._engine = engine
        self._settings = settings
        self._model = model
        self._fingerprint = fingerprint

    async def start(self) -> None:
        """Listen and start the engine. Raises OSError, naming the address, when a port is taken."""
        settings, host = self._settings, self._settings.host
        check_ports(settings)  # gRPC would explain a failure on stderr, in its own words
        metrics = Metrics(self._engine.facts, self._model, self._engine.load)
        self._server = grpc.aio.server(options=OPTIONS)
        try:
            with _listening(address := _address(host, settings.grpc_port)):
                self.address = _address(host, self._server.add_insecure_port(address))
            with _listening(_address(host, settings.metrics_port)):
                self._scrapes = metrics.serve(host, settings.metrics_port)
            self.metrics_address = _address(host, self._scrapes.server_port)
        except OSError:
            await self._server.stop(0)
            raise
        self._service = Service(self._engine, self._describe(), settings.max_waiting, metrics)
        self._health = health.aio.HealthServicer()
        replica_pb2_grpc.add_ReplicaServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._engine.start(self._service.emit)
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._server.start()

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
        # On a daemon thread, for which neither the loop nor the process waits when they end.
        stopper = threading.Thread(target=self._engine.stop, name="engine-stop", daemon=True)
        stopper.start()
        await asyncio.to_thread(stopper.join, ENGINE_STOP_S)
        if stopper.is_alive():
            log.error("the engine hangs in a step; it is left behind")

    def _describe(self) -> pb.Description:
        facts = self._engine.facts
        return pb.Description(
            replica_id=self._settings.replica_id or self.address,
            epoch=new_epoch(),
            model=self._model,
            tokenizer_fingerprint=self._fingerprint,
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
        """Follow the engine's health, and tell those who ask."""
        loop = asyncio.get_running_loop()
        sick_since = math.inf
        while True:
            fault = self._service.fault = self._engine.healthy()
            sick_since = min(sick_since, loop.time()) if fault else math.inf
            if loop.time() - sick_since >= GIVE_UP_S and not self._failure.done():
                self._failure.set_result(fault)
            here = self._service.description
            serving = not (fault or here.draining or here.state)
            reply = health_pb2.HealthCheckResponse
            for name in ("", SERVICE):
                await self._health.set(name, reply.SERVING if serving else reply.NOT_SERVING)
            await asyncio.sleep(HEALTH_INTERVAL_S)
