"""Replicas with real vLLM and a router, as processes, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from bench.cluster import free_port

START_S = 200.0
STOP_S = 60.0
BLOCK = 32  # tokens; the least that vLLM has on a CPU
BLOCKS = 200

ENGINE_ARGS = {
    "enforce_eager": "true",
    "block_size": str(BLOCK),
    "num_gpu_blocks_override": str(BLOCKS),
    "max_num_batched_tokens": "512",
    "max_num_seqs": "8",
}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Process:
    """A process of ours with its lines; ended at the end, by force if need be."""

    def __init__(
        self,
        command: Sequence[str],
        cpu: int | None,
        environ: dict[str, str],
        module: str = "hotbranch",
    ) -> None:
        pinned = ["taskset", "--cpu-list", str(cpu)] if cpu is not None else []
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*pinned, sys.executable, "-m", module, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environ,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def says(self, words: str, timeout_s: float = START_S) -> str:
        """Wait for a line with these words, unless there was one."""
        deadline = time.monotonic() + timeout_s
        while (line := next((line for line in self.lines if words in line), None)) is None:
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, "".join(self.lines[-30:])
            time.sleep(0.05)
        return line

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Ask it to end, and see that all its processes have."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            with_group(self.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


def with_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


class Replica(Process):
    """`hotbranch replica --engine vllm`. `scratch` holds its sockets."""

    def __init__(
        self,
        scratch: Path,
        cpu: int | None = None,
        port: int = 0,
        flags: Sequence[str] = (),
        **engine_args: str,
    ) -> None:
        self.scratch = scratch
        self.port = port or free_port()
        self.metrics_port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        arguments = [f"--engine-args={k}={v}" for k, v in (ENGINE_ARGS | engine_args).items() if v]
        command = ["replica", "--engine", "vllm", "--grpc-port", str(self.port)]
        command += ["--metrics-port", str(self.metrics_port), "--max-context", "4096"]
        command += ["--dtype", "float32", "--replica-id", f"r{self.port}", *arguments, *flags]
        scratch.mkdir(parents=True, exist_ok=True)
        super().__init__(command, cpu, ON_CPU | {"TMPDIR": str(scratch)})

    def ready(self) -> "Replica":
        self.says("serving smollm2")
        return self

    @property
    def events(self) -> str:
        """Where its vLLM publishes."""
        (place,) = self.scratch.glob("hotbranch-*/events")
        return f"ipc://{place}"

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(f"{name}{{") or line.startswith(f"{name} ")
        ]
        return sum(values)

    def core(self) -> int:
        """The process id of vLLM's core."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                try:
                    ours = os.getpgid(int(entry.name)) == self.pid
                    title = (entry / "cmdline").read_text() if ours else ""
                except OSError:
                    continue
                if "EngineCore" in title:
                    return int(entry.name)
        raise AssertionError("vLLM has no core")


class Server(Process):
    """vLLM's own OpenAI server, with KV events, and with endpoints that reset its cache."""

    def __init__(self, scratch: Path, model: Path, cpu: int | None, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        self.events, self.replay = f"ipc://{scratch}/events", f"ipc://{scratch}/replay"
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": self.events, "replay_endpoint": self.replay}
        command = ["--host", "127.0.0.1", "--port", str(self.port), "--model", str(model)]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)]
        command += ["--kv-events-config", json.dumps(events), *flags]
        environ = ON_CPU | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        super().__init__(command, cpu, environ, "vllm.entrypoints.openai.api_server")

    def ready(self) -> "Server":
        self.says("Application startup complete")
        return self


class Router(Process):
    """`hotbranch router` in front of replicas."""

    def __init__(self, replicas: Sequence[str], flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        named = [flag for address in replicas for flag in ("--replica", address)]
        super().__init__(["router", "--port", str(self.port), *named, *flags], None, {})

    def ready(self, replicas: int) -> "Router":
        self.says("router serves")
        deadline = time.monotonic() + START_S
        while sum(replica["state"] == "ready" for replica in self.replicas()) < replicas:
            assert time.monotonic() < deadline, self.replicas()
            time.sleep(0.1)
        return self

    def replicas(self) -> list[dict[str, object]]:
        answer = httpx.get(f"{self.url}/admin/replicas").raise_for_status().json()
        return list(answer["replicas"])

    def held(self, replica_id: str) -> set[int]:
        """What its index says of a replica."""
        answer = httpx.get(f"{self.url}/admin/index/{replica_id}").raise_for_status().json()
        return {int(key, 16) for key in answer["keys"]}


@contextmanager
def stopping(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.stop()
