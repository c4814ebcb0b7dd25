"""Where replicas on Ray say that they live, and where routers hear of it.

One small named actor for each application holds what heartbeats carry: where replicas are, and what
waits at routers, which replicas hear of in return. A heartbeat
carries everything, so the actor has no state that a restart could lose; a young registry, which has
not heard from everybody yet, takes nobody away from what a router already knows.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

BEAT_S = 1.0
EXPIRY_S = 10.0  # long against a heartbeat held up on a busy machine: links see a death sooner
POLL_S = 5.0
TICK_S = 0.1
IDLE_S = 60.0

_NAME = "registry"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a replica is doing. `address` (host:port, gRPC) is where it listens, be it loading."""

    replica_id: str
    phase: str
    address: str


@dataclass(slots=True)
class Directory:
    """The replicas heard of in the last `EXPIRY_S` seconds. Times are of one monotonic clock."""

    born: float
    _heard: dict[str, tuple[float, Beat]] = field(default_factory=dict)
    _queues: dict[str, tuple[float, float]] = field(default_factory=dict)

    def hear(self, beat: Beat, now: float) -> None:
        """Keep a heartbeat in place of the last one of its replica."""
        self._heard[beat.replica_id] = (now, beat)

    def forget(self, replica_id: str) -> None:
        """Take away a replica that says goodbye; unknown ones are ignored."""
        self._heard.pop(replica_id, None)

    def beats(self, now: float) -> list[Beat]:
        """The last heartbeat of every replica that is not silent, by replica id."""
        self._heard = {
            name: entry for name, entry in self._heard.items() if now - entry[0] < EXPIRY_S
        }
        return [self._heard[name][1] for name in sorted(self._heard)]

    def hear_queue(self, router_id: str, seconds: float, now: float) -> None:
        """Keep what waits at a router, in seconds of prefill, in place of what it last said."""
        self._queues[router_id] = (now, seconds)

    def queued_s(self, now: float) -> float:
        """What waits at the routers that are not silent."""
        self._queues = {
            name: entry for name, entry in self._queues.items() if now - entry[0] < EXPIRY_S
        }
        return sum(seconds for _, seconds in self._queues.values())

    def addresses(self, known: frozenset[str], now: float) -> frozenset[str]:
        """Where replicas listen; while the directory is young, `known` ones count as heard."""
        heard = frozenset(beat.address for beat in self.beats(now))
        return heard | known if now - self.born < EXPIRY_S else heard


class Registry:
    """The actor around a `Directory`. It ends itself after `IDLE_S` seconds without a call."""

    def __init__(self) -> None:
        self._directory = Directory(born=time.monotonic())
        self._end: asyncio.TimerHandle | None = None
        self._called()

    async def beat(self, beat: Beat) -> float:
        """Take a heartbeat; the seconds of prefill that wait at the routers."""
        self._called()
        now = time.monotonic()
        self._directory.hear(beat, now)
        return self._directory.queued_s(now)

    async def queue(self, router_id: str, seconds: float) -> None:
        """Take what waits at a router."""
        self._called()
        self._directory.hear_queue(router_id, seconds, time.monotonic())

    async def leave(self, replica_id: str) -> None:
        """Take a replica away at once."""
        self._directory.forget(replica_id)

    async def beats(self) -> list[Beat]:
        """What every replica last said."""
        self._called()
        return self._directory.beats(time.monotonic())

    async def changes(self, known: frozenset[str] | None) -> frozenset[str]:
        """The addresses, once they differ from `known` or `POLL_S` seconds have passed."""
        self._called()
        start = time.monotonic()
        while True:
            now = time.monotonic()
            addresses = self._directory.addresses(known or frozenset(), now)
            if addresses != known or now - start > POLL_S:
                return addresses
            await asyncio.sleep(TICK_S)

    def _called(self) -> None:
        if self._end:
            self._end.cancel()
        this = ray.get_runtime_context().current_actor
        self._end = asyncio.get_running_loop().call_later(IDLE_S, ray.kill, this)


_RegistryActor = ray.remote(Registry)


def _namespace(app: str) -> str:
    return f"hotbranch-{app}"


def open_registry(app: str) -> Any:
    """Handle of the application's registry, which is created where there is none. Blocks."""
    options = {
        "name": _NAME,
        "namespace": _namespace(app),
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    return _RegistryActor.options(**options).remote()


def close_registry(app: str) -> None:
    """End the application's registry, if there is one. Blocks."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(_NAME, namespace=_namespace(app)))


async def each_beat(app: str, call: Callable[[Any], Awaitable[None]]) -> None:
    """Call the application's registry once a second, for ever."""
    registry: Any = None
    while True:
        try:
            registry = registry or await asyncio.to_thread(open_registry, app)
            await asyncio.wait_for(call(registry), EXPIRY_S)
        except (RayError, OSError):
            registry = None
        await asyncio.sleep(BEAT_S)


class Heart:
    """Tells the registry once a second what `beat` returns, from start to stop.

    `queued_s` are the seconds of prefill that waited at the routers when it last answered.
    """

    def __init__(self, app: str, beat: Callable[[], Beat]) -> None:
        self.queued_s = 0.0
        self._app = app
        self._beat = beat
        self._task = asyncio.get_running_loop().create_task(each_beat(app, self._tell))

    async def stop(self) -> None:
        """Say goodbye. Never raises: a registry that cannot be told learns it from the silence."""
        self._task.cancel()
        await asyncio.wait([self._task])
        with suppress(RayError, OSError):
            registry = await asyncio.to_thread(open_registry, self._app)
            await asyncio.wait_for(registry.leave.remote(self._beat().replica_id), BEAT_S)

    async def _tell(self, registry: Any) -> None:
        self.queued_s = await registry.beat.remote(self._beat())


class RayDiscovery:
    """Discovery for the router: the addresses in the application's registry."""

    def __init__(self, app: str) -> None:
        self._app = app

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """The full set of gRPC addresses, first at once, then on every change."""
        registry: Any = None
        known: frozenset[str] | None = None
        while True:
            try:
                registry = registry or await asyncio.to_thread(open_registry, self._app)
                addresses = await registry.changes.remote(known)
            except (RayError, OSError):
                registry = None
                await asyncio.sleep(BEAT_S)
                continue
            if addresses != known:
                known = addresses
                yield known
