"""The router process: every part put together, started, and stopped when asked to."""

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvloop

from hotbranch.embedded import ModelError, resolve_model
from hotbranch.keys import key_check
from hotbranch.log import event
from hotbranch.settings import GatewaySettings, RouterSettings
from hotbranch.upstream import Upstream as UpstreamSettings
from router.api.app import App
from router.api.http import Running, serve
from router.fleet.discovery import Discovery, StaticDiscovery
from router.fleet.fleet import Fleet
from router.fleet.link import State
from router.fleet.member import M, Members
from router.index.index import Index
from router.index.view import View
from router.observe.admin import Admin
from router.observe.metrics import Metrics
from router.prompt.models import Catalog, Model, load_model
from router.schedule.dispatch import QueueingDispatcher
from router.schedule.forward import UpstreamForwarder
from router.schedule.policies import policy
from router.schedule.scheduler import Rules
from router.upstream.caches import Caches
from router.upstream.fleet import Upstreams
from router.upstream.link import Upstream

EXPIRE_S = 1.0
UNUSABLE = 2  # exit status of settings that cannot work here, as of wrong flags

log = logging.getLogger(__name__)


class Router:
    """One router, over the replicas that discovery names, or over upstreams. Needs a running event
    loop from `start` on; `port` and `address` are set by it.

    Raises ModelError, OSError or ValueError for a model that cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        discovery: Discovery,
        upstreams: Sequence[UpstreamSettings] = (),
    ) -> None:
        self._settings = settings
        # Upstreams obey a control token in what a client sends, replicas are told that it is text.
        models = load_models(settings, guards=not upstreams)
        fingerprints = {name: model.fingerprint for name, model in models.items()}
        key_check()
        self.index = Index(settings.index_blocks, settings.prediction_s)
        self.recoveries: Counter[str] = Counter()
        self.fleet: Fleet | Upstreams
        self.dispatcher: QueueingDispatcher[Any]
        dispatcher = forwarder = None
        if upstreams:
            self.fleet = Upstreams(self._connect(upstreams, models))
            self.dispatcher = forwarding = self._dispatcher(self.fleet)
            forwarder = UpstreamForwarder(self.fleet, forwarding, self.index)
        else:
            self.fleet = Fleet(
                discovery,
                fingerprints,
                lambda address: View(self.index, address, self.recoveries),
                settings.drain_s,
            )
            self.dispatcher = dispatcher = self._dispatcher(self.fleet)
        self.metrics = Metrics(self.fleet, self.index, self.dispatcher, self.recoveries)
        admin = Admin(self.fleet, self.index)
        self._app = App(
            settings,
            Catalog(models, self.adapters),
            dispatcher,
            self.metrics,
            self.ready_models,
            self.metrics.registry,
            {
                "/admin/replicas": {"GET": admin.replicas},
                "/admin/index/": {"GET": admin.index},
                "/admin/branches": {"GET": admin.branches},
            },
            forwarder=forwarder,
        )

    def _dispatcher(self, fleet: Members[M]) -> QueueingDispatcher[M]:
        settings = self._settings
        return QueueingDispatcher(
            fleet,
            self.index,
            Rules(
                window=settings.window,
                starvation_s=settings.starvation_s,
                most_waiting=settings.max_queued,
            ),
            {tenant.name: tenant.weight for tenant in settings.tenants},
            # Routers that drew the same would all prefer the same replica at the same time.
            partial(policy, settings.routing_policy, random.getrandbits(64)),
        )

    def _connect(
        self, upstreams: Sequence[UpstreamSettings], models: Mapping[str, Model]
    ) -> Callable[[Callable[[Upstream], None]], list[Upstream]]:
        keys = [_key(upstream) for upstream in upstreams]

        def connect(changed: Callable[[Upstream], None]) -> list[Upstream]:
            return [
                Upstream(one, key, models, Caches(self.index, one, self.recoveries), changed)
                for one, key in zip(upstreams, keys, strict=True)
            ]

        return connect

    def ready_models(self) -> set[str]:
        """Served names that some replica takes requests for."""
        return {
            link.description.model
            for link in self.fleet.links
            if link.state is State.READY and link.description
        }

    def adapters(self) -> dict[str, str]:
        """Names of LoRA adapters that some replica has, to served names. One that is away for a
        while is still known: to ask again later helps."""
        return {
            adapter: link.description.model
            for link in self.fleet.links
            if link.state is not State.REFUSED and link.description
            for adapter in link.description.adapters
        }

    def ready(self) -> bool:
        return bool(self.ready_models())

    async def start(self) -> None:
        """Listen. Raises OSError naming the port when it cannot be had."""
        self._http: Running = await serve(
            self._app, self._settings.router_host, self._settings.port
        )
        self.port = self._http.port
        self.address = f"{self._settings.router_host}:{self.port}"
        await self.fleet.start()
        self._ticker = asyncio.create_task(self._tick(), name="expire predictions")

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let open ones finish for up to `drain_s` seconds, then end them."""
        await self._http.stop(drain_s)
        self._ticker.cancel()
        await self.fleet.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.index.expire(time.monotonic())


def load_models(settings: GatewaySettings, guards: bool = True) -> dict[str, Model]:
    """Served models by name: the main one and the further ones of `models`. `guards` as of a
    Renderer."""
    name, directory = resolve_model(settings.model, settings.cache_dir)
    name = settings.served_name or name
    models = {name: load_model(name, directory, guards=guards)}
    if name in settings.models:
        raise ValueError(f"two models are called {name!r}")
    for further, path in settings.models.items():
        _, directory = resolve_model(path, settings.cache_dir)
        models[further] = load_model(further, directory, guards=guards)
    return models


def _key(upstream: UpstreamSettings) -> str:
    """The key of an upstream, from the environment. Raises ValueError where it is not there."""
    name = upstream.api_key_env
    if name and not os.environ.get(name):
        raise ValueError(f"--upstream {upstream.url}: the variable {name} is not set")
    return os.environ[name] if name else ""


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    0 after a stop, 2 when the settings cannot work here. The first signal lets open requests finish
    for up to `drain_s` seconds, the second one does not wait.
    """
    return uvloop.run(_serve(settings))


async def _serve(settings: RouterSettings) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    try:
        router = Router(settings, StaticDiscovery(settings.replica), settings.upstream)
        await router.start()
    except (ModelError, OSError, ValueError) as error:
        print(f"hotbranch router: {error}", file=sys.stderr)
        return UNUSABLE
    event(
        log,
        "router serves",
        url=f"http://{router.address}/v1",
        replicas=len(settings.replica),
        upstreams=len(settings.upstream),
    )
    await signals.get()
    event(
        log,
        "router drains",
        seconds=settings.drain_s,
        open=router.dispatcher.open_routes,
    )
    stopped = asyncio.create_task(router.stop(settings.drain_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((stopped, again), return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        await router.stop(0)
    return 0
