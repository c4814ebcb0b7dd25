"""`hotbranch up`: the whole fleet on this machine, from one command, until Ctrl-C.

Without RAY_ADDRESS it starts a Ray of its own, on the loopback interface, and ends it; with it, it
joins that Ray and takes away only what it brought. The first Ctrl-C lets running requests finish,
the second does not.
"""

import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from types import FrameType
from typing import Any

from rich.console import Console

from deploy import panel
from hotbranch import progress
from hotbranch.embedded import ModelError, resolve_model
from hotbranch.ports import free_address
from hotbranch.settings import UpSettings

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum is 75 MiB; nothing of ours goes through it
POLL_S = 0.5
TIMEOUT_S = 1.0
SERVE_NAMESPACE = "serve"

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class StartError(Exception):
    """It cannot start; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Place:
    """The Ray we are in, and whether it, and Serve in it, are ours to end."""

    address: str  # host:port of its head
    log_dir: str
    owns_ray: bool
    owns_serve: bool

    def answers(self) -> bool:
        """Whether its head still listens. Ray's own calls take a minute to find out."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S).close()
        except OSError:
            return False
        return True


def run(settings: UpSettings) -> int:
    """Run until a signal. The exit status: 0 after a signal, 1 when it failed, 2 on bad input."""
    with _signals(_interrupt):
        try:
            settings = _prepared(settings)
        except (StartError, ModelError) as error:
            return _fail(error, 2)
        except KeyboardInterrupt:
            return 0
        try:
            with _ray(settings) as place, _application(settings, place) as registry:
                _wait(settings, registry)
                _show(settings, registry, place)
        except StartError as error:
            return _fail(error, 1)
        except KeyboardInterrupt:
            pass
    return 0


def _fail(error: Exception, status: int) -> int:
    err.print(f"hotbranch: {error}", style="red", soft_wrap=True, markup=False)
    return status


def _foreign() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Handle SIGINT and SIGTERM alike."""
    previous = {
        number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _prepared(settings: UpSettings) -> UpSettings:
    """Settings with the port, the model and the threads of a replica decided."""
    try:
        _, port = free_address(settings.router_host, settings.port)
    except OSError as error:
        raise StartError(str(error)) from None
    name, directory = resolve_model(settings.model, settings.cache_dir)
    changes: dict[str, object] = {"port": port, "served_name": settings.served_name or name}
    if settings.model != name:
        changes["model"] = str(directory)
    if settings.engine != "vllm" and not settings.threads and not _foreign():
        cores = len(os.sched_getaffinity(0))
        changes["threads"] = max(1, cores // settings.most_replicas)
    return settings.model_copy(update=changes)


@contextmanager
def _ray(settings: UpSettings) -> Iterator[Place]:
    """Join the Ray of RAY_ADDRESS, or run one of our own."""
    temp_dir = None
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not _foreign():
        # Ray's name for it is odd: off, it takes the loopback address for that of its only node.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Ray's own choice, 15, lets any other work on this machine starve the replicas.
        os.environ.setdefault("RAY_worker_niceness", "0")
        temp_dir = tempfile.mkdtemp(prefix="hotbranch-")
        cpus = settings.most_replicas * settings.replica_cpus + settings.router_cpus
        options |= {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": math.ceil(cpus) + 1,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": temp_dir,
        }
    import ray  # not before its environment is set

    keep_logs = False
    try:
        with progress.shown(sys.stderr) as report:
            report("joining Ray" if _foreign() else "starting Ray", 0.0)
            context = _joined(options)
        signal.signal(signal.SIGTERM, _interrupt)  # ray.init took it
        names = ray.util.list_named_actors(all_namespaces=True)
        owns_serve = all(name["namespace"] != SERVE_NAMESPACE for name in names)
        address, session = (context.address_info[key] for key in ("address", "session_dir"))
        yield Place(address, f"{session}/logs", temp_dir is not None, owns_serve)
    except (OSError, StartError, ray.exceptions.RayError) as error:
        keep_logs = temp_dir is not None
        reason = str(error).partition("\n")[0]
        raise StartError(f"{reason} (logs: {temp_dir})" if keep_logs else reason) from None
    finally:
        with _signals(signal.SIG_IGN):
            ray.shutdown()
            if temp_dir and not keep_logs:
                shutil.rmtree(temp_dir, ignore_errors=True)


def _joined(options: dict[str, Any]) -> Any:
    """Ray's context. Raises StartError: what Ray raises when it cannot start has no common type."""
    import ray

    try:
        return ray.init(**options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise StartError(f"Ray does not start: {reason}") from None


@contextmanager
def _application(settings: UpSettings, place: Place) -> Iterator[Any]:
    """Deploy our application; gives its registry, and takes all back at the end."""
    from ray import serve

    from deploy.app import application, node_address
    from deploy.registry import open_registry

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _check_gpus(settings, place)
    app = f"hotbranch-{settings.port}"
    if not place.owns_serve and app in serve.status().applications:
        raise StartError(f"an application {app} is on this Ray already")
    try:
        if place.owns_serve:
            serve.start(proxy_location="Disabled")
        here = {f"node:{node_address()}": 0.001}
        target = application(settings, start_attempts=1, router_resources=here)
        serve.run_many(
            [serve.RunTarget(target, name=app, route_prefix=None)],
            wait_for_applications_running=False,
        )
        yield open_registry(app)
    except KeyboardInterrupt:
        err.print("stopping; again to stop at once")
        raise
    finally:
        _withdraw(app, place)


def _withdraw(app: str, place: Place) -> None:
    """Take the application away, unless Ray goes first: a signal may have met its processes too."""
    from ray import serve

    from deploy.registry import close_registry

    def withdraw() -> None:
        serve.delete(app)
        close_registry(app)
        if place.owns_serve and not place.owns_ray and not serve.status().applications:
            serve.shutdown()  # type: ignore[no-untyped-call]

    thread = Thread(target=withdraw, daemon=True)
    thread.start()
    while thread.is_alive() and place.answers():
        thread.join(POLL_S)


def _check_gpus(settings: UpSettings, place: Place) -> None:
    """Raise StartError when our own Ray will never have the GPUs that are asked for."""
    import ray

    needed = settings.most_replicas * settings.replica_gpus
    there = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if place.owns_ray and needed > there:
        raise StartError(
            f"{settings.most_replicas} replicas need {needed:g} GPUs, here are {there:g}"
        )


def _wait(settings: UpSettings, registry: Any) -> None:
    """Until every replica serves and the router says that it is ready. Raises StartError."""
    import ray
    from ray import serve

    with progress.shown(sys.stderr) as report:
        while True:
            status = serve.status().applications[f"hotbranch-{settings.port}"]
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartError(_reason(status))
            beats = ray.get(registry.beats.remote())
            starting = [beat for beat in beats if beat.phase != "serving"]
            done = len(beats) - len(starting)
            if done < settings.replicas:
                phase = starting[0].phase if starting else "starting"
                stage = f"replica {done + 1} of {settings.replicas} {phase}"
                report(stage, done / settings.replicas)
            elif status.status != "RUNNING" or not panel.sees(*_at(settings), settings.replicas):
                report("starting the router", 1.0)
            else:
                return
            time.sleep(POLL_S)


def _reason(status: Any) -> str:
    """The last line of what Serve says of the deployments that failed, which is the exception."""
    for name, deployment in status.deployments.items():
        if deployment.message and deployment.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            last = deployment.message.strip().splitlines()[-1]
            return f"{name.lower()} cannot start: {last}"
    return str(status.message)


def _at(settings: UpSettings) -> tuple[str, int]:
    """Host and port under which this machine reaches the router."""
    loopback = {"0.0.0.0": LOOPBACK, "::": "::1"}
    return loopback.get(settings.router_host, settings.router_host), settings.port


def _show(settings: UpSettings, registry: Any, place: Place) -> None:
    """Show the panel until a signal."""
    host, port = _at(settings)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    model = settings.served_name
    if out.is_terminal:
        panel.head(out, url, model, place.log_dir, keyed=bool(settings.tenants))
        panel.live(out, host, port, lambda: _heard(registry))
    else:
        print(f"ready {url}/v1 model={model} replicas={settings.replicas}", flush=True)
        panel.lines(host, port)


def _heard(registry: Any) -> Sequence[panel.Replica]:
    """The replicas as they report themselves."""
    import ray

    try:
        beats = ray.get(registry.beats.remote(), timeout=TIMEOUT_S)
    except ray.exceptions.RayError:
        return []
    return [panel.Replica(beat.replica_id, beat.address, beat.phase) for beat in beats]
