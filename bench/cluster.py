"""A cluster started as a user starts it, for benchmarks and end-to-end tests."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

START_S = 150.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running `hotbranch up`: base URL without a slash at its end, and its process id."""

    url: str
    pid: int


@contextmanager
def cluster(flags: Sequence[str]) -> Iterator[Cluster]:
    """Run `hotbranch up` with these flags on a free port; Ctrl-C it at the end.

    Raises RuntimeError when it ends before it is ready, or does not end cleanly.
    """
    port = free_port()
    command = [sys.executable, "-m", "hotbranch", "up", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    lines = _echo(process.stdout)
    try:
        _wait_until_ready(process, lines)
        yield Cluster(f"http://127.0.0.1:{port}", process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"hotbranch up did not stop within {STOP_S:.0f} s") from None
    if code != 0:
        raise RuntimeError(f"hotbranch up ended with exit status {code}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _echo(stream: IO[str]) -> "queue.Queue[str]":
    """Print the process's lines as they come, and hand them on."""
    lines: queue.Queue[str] = queue.Queue()

    def copy() -> None:
        for line in stream:
            print(line, end="", flush=True)
            lines.put(line)

    threading.Thread(target=copy, daemon=True).start()
    return lines


def _wait_until_ready(process: subprocess.Popen[str], lines: "queue.Queue[str]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if lines.get(timeout=0.5).startswith("ready "):
                return
        except queue.Empty:
            if process.poll() is not None:
                raise RuntimeError(f"hotbranch up ended with {process.returncode}") from None
    raise RuntimeError(f"hotbranch up was not ready within {START_S:.0f} s")
