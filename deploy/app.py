"""The Ray Serve application: replicas and a router, each a real server inside a Serve actor.

Serve places the processes, restarts and scales them. Requests never pass through it: clients speak
HTTP with the router, and the router speaks gRPC with the replicas that the registry names.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from deploy import autoscale
from deploy.registry import Beat, Heart, RayDiscovery, each_beat
from hotbranch import log
from hotbranch.load_settings import load_settings
from hotbranch.settings import EngineSettings, ReplicaSettings, UpSettings
from hotbranch.states import in_words
from replicas.build import build_engine
from replicas.engine import StartError
from replicas.server import FAULT_SHOWN_S, ReplicaServer
from router.main import Router as Gateway

STOP_S = 10.0  # to end a process whose requests have had their time to finish
START_ATTEMPTS = 20  # a replica may wait for a GPU that its predecessor has not let go of
HEALTH_PERIOD_S = 1.0


class Replica:
    """One replica, on the address of its node and a free port."""

    _heart: Heart | None = None
    _server: ReplicaServer | None = None
    _sampler: asyncio.Task[None] | None = None

    async def __init__(self, settings: UpSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        log.setup(settings.log_level, settings.log_format, "replica")
        context = serve.get_replica_context()
        replica_id = f"replica-{context.replica_tag}"
        engine_settings = settings.model_dump(include=set(EngineSettings.model_fields))
        own = ReplicaSettings(**engine_settings, replica_id=replica_id, host=node_address())
        self._drain_s = settings.drain_s
        server = ReplicaServer(own)
        await server.start()
        self._server = server
        self._heart = Heart(
            context.app_name, lambda: Beat(replica_id, in_words(server.state), server.address)
        )
        try:
            await server.load(partial(build_engine, own))
        except StartError:
            await asyncio.sleep(FAULT_SHOWN_S)
            await self._heart.stop()
            await server.stop(0)
            raise
        self._failure = asyncio.create_task(server.failure())
        self._meter = autoscale.Meter()
        self._sampler = asyncio.create_task(self._sample(server))

    async def check_health(self) -> None:
        """Raise when the engine has failed for good: Serve puts a new replica in its place."""
        if self._failure.done():
            raise RuntimeError(self._failure.result())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy hears of this replica. Serve asks where the number may change."""
        queued_s = self._heart.queued_s if self._heart else 0.0
        return {**self._meter.read(), "queued_s": queued_s}

    async def _sample(self, server: ReplicaServer) -> None:
        while True:
            self._meter.sample(server.engine_load())
            await asyncio.sleep(autoscale.SAMPLE_S)

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica, be it while the weights are loading."""
        if self._heart:
            await self._heart.stop()
        if self._sampler:
            self._sampler.cancel()
        if self._server:
            await self._server.stop(self._drain_s)


class Router:
    """The router, on its own HTTP port. Serve's proxies, where they run, point to it."""

    _gateway: Gateway | None = None

    async def __init__(self, settings: UpSettings, replicas: object) -> None:  # type: ignore[misc]
        log.setup(settings.log_level, settings.log_format, "router")
        self._settings = settings
        context = serve.get_replica_context()
        discovery = RayDiscovery(context.app_name)
        gateway = await asyncio.to_thread(Gateway, settings, discovery)
        await gateway.start()
        self._gateway = gateway
        self._telling = asyncio.create_task(each_beat(context.app_name, self._tell))

    async def __call__(self, request: Request) -> PlainTextResponse:
        """What comes through Serve's proxy belongs to the router's own port."""
        host = self._settings.router_host
        host = node_address() if host in ("0.0.0.0", "::") else host
        host = f"[{host}]" if ":" in host else host
        url = str(request.url.replace(scheme="http", hostname=host, port=self._port()))
        return PlainTextResponse(f"hotbranch answers at {url}\n", 308, {"location": url})

    async def check_health(self) -> None:
        """Raise when nobody listens on the port any more."""
        _, writer = await asyncio.open_connection(self._settings.router_host, self._port())
        writer.close()

    async def _tell(self, registry: Any) -> None:
        """Tell replicas what waits here for them: it is as much work as what they have."""
        assert self._gateway
        router_id = serve.get_replica_context().replica_tag
        await registry.queue.remote(router_id, self._gateway.dispatcher.queued_s)

    def _port(self) -> int:
        return self._gateway.port if self._gateway else self._settings.port

    async def __del__(self) -> None:
        """Serve awaits this when it stops the router."""
        if self._gateway:
            self._telling.cancel()
            await self._gateway.stop(self._settings.drain_s)


def application(
    settings: UpSettings,
    start_attempts: int = START_ATTEMPTS,
    router_resources: Mapping[str, float] | None = None,
) -> Application:
    """The Serve application of `settings`.

    Serve gives up on a replica that has failed to start `start_attempts` times. The router lies on
    a node that has `router_resources`.
    """
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": settings.drain_s + STOP_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_constructor_retry_count": start_attempts,
    }
    replica = serve.deployment(
        **_number(settings),
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        **common,
    )(Replica)
    router = serve.deployment(
        ray_actor_options={"num_cpus": settings.router_cpus, "resources": router_resources or {}},
        **common,
    )(Router)
    return router.bind(settings, replica.bind(settings))


def _number(settings: UpSettings) -> dict[str, Any]:
    """How many replicas: so many, or what their work needs."""
    if not settings.max_replicas:
        return {"num_replicas": settings.replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=autoscale.OutstandingWork,
        policy_kwargs={"queue_s": settings.target_queue_s},
    )
    scaling = AutoscalingConfig(
        min_replicas=settings.replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.scale_up_s,
        downscale_delay_s=settings.scale_down_s,
        look_back_period_s=autoscale.LOOK_BACK_S,
        metrics_interval_s=autoscale.REPORT_S,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def node_address() -> str:
    """The address under which the nodes of the cluster reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def build(args: dict[str, Any]) -> Application:
    """Builder for `serve run deploy.app:build KEY=VALUE...` and the `args:` of a config file.

    The arguments are the fields of `UpSettings`. Raises SettingsError, one line that names the
    wrong one.
    """
    return application(load_settings(UpSettings, args, environ={}))
