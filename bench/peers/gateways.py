"""Routers before the same two servers, each started as its users start it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster import free_port

ROOT = Path(__file__).parents[2]
GATEWAYS = ROOT / ".venv-gateways/bin"
START_S = 60.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """A vLLM server, and where it publishes what it caches."""

    url: str
    events: str
    replay: str


Command = Callable[[Sequence[Upstream], int], list[str]]


def _ours(policy: str) -> Command:
    def command(upstreams: Sequence[Upstream], port: int) -> list[str]:
        flags = [
            f"--upstream={each.url},kv_events={each.events},replay={each.replay}"
            for each in upstreams
        ]
        flags += ["--routing-policy", policy, "--port", str(port)]
        return [sys.executable, "-m", "hotbranch", "router", *flags]

    return command


def _sglang(upstreams: Sequence[Upstream], port: int) -> list[str]:
    return [
        str(GATEWAYS / "python"),
        *("-m", "sglang_router.launch_router", "--policy", "cache_aware"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--worker-urls", *(each.url for each in upstreams)),
    ]


def _smg(upstreams: Sequence[Upstream], port: int) -> list[str]:
    return [
        *(str(GATEWAYS / "smg"), "launch", "--policy", "cache_aware"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--worker-urls", *(each.url for each in upstreams)),
    ]


COMMANDS: Mapping[str, Command] = {
    "hotbranch": _ours("hotbranch"),
    "round_robin": _ours("round_robin"),
    "sglang_cache_aware": _sglang,
    "smg_cache_aware": _smg,
}


@contextmanager
def gateway(policy: str, upstreams: Sequence[Upstream], body: bytes) -> Iterator[str]:
    """The URL of a router that answers `body`. Raises RuntimeError when it does not."""
    port = free_port()
    with process(COMMANDS[policy](upstreams, port)) as running:
        url = f"http://127.0.0.1:{port}"
        _wait(url, body, running, policy)
        yield url


@contextmanager
def process(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run it in a group of its own; nothing of it is left behind. Its output is shown on failure
    only, by whoever waits for it: it goes to stderr when BENCH_VERBOSE is set."""
    out = None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL
    running = subprocess.Popen(
        command,
        stdout=out,
        stderr=out,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            running.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _wait(url: str, body: bytes, running: "subprocess.Popen[bytes]", name: str) -> None:
    """Until it answers a request, as often as there are servers: each may be registered later."""
    deadline = time.monotonic() + START_S
    headers = {"content-type": "application/json"}
    good = 0
    while good < 4:
        if running.poll() is not None:
            raise RuntimeError(f"{name} ended with {running.returncode}")
        try:
            answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=30)
            good = good + 1 if answer.status_code == 200 else 0
        except httpx.TransportError:
            good = 0
        if not good:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not answer within {START_S:.0f} s")
            time.sleep(0.3)
