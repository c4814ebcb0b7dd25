"""Simulated replicas as they really run: each a process that serves gRPC on loopback."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.cluster import free_port

STOP_S = 10.0  # for a process to end by itself


class NotStarted(Exception):
    """Some replicas did not come up; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Processes by their address. They serve some seconds after their start."""

    processes: dict[str, subprocess.Popen[bytes]]

    @property
    def addresses(self) -> Sequence[str]:
        return list(self.processes)

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())


@contextmanager
def replica_processes(number: int, flags: Sequence[str]) -> Iterator[Replicas]:
    """So many replicas with these flags, on free ports; all have ended when this is left."""
    command = [sys.executable, "-m", "hotbranch", "replica", "--log-level=warning", *flags]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while len(processes) < number:
            port = free_port()
            address = f"127.0.0.1:{port}"
            if address in processes:
                continue
            # In a session of its own: Ctrl-C is for us, and we end them.
            processes[address] = subprocess.Popen(
                [*command, f"--grpc-port={port}"], start_new_session=True
            )
        yield Replicas(processes)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
