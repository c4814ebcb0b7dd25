"""The replica as a process: its signals, its exit status, what it says on stderr."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from replica_client import endless

from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, ClientFrame, Submit

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0


@dataclass
class Process:
    """A replica process, and its stderr, which names the ports."""

    popen: subprocess.Popen[bytes]
    log: Path

    def addresses(self) -> tuple[str, str]:
        """Where gRPC and the metrics are, once it serves."""
        pattern = r"serving \S+ on (\S+), metrics on ([^\s\"]+)"
        self._wait(lambda: re.search(pattern, self.log.read_text()) is not None)
        found = re.search(pattern, self.log.read_text())
        assert found
        return found[1], found[2]

    def says(self, text: str) -> None:
        """Wait until stderr says so."""
        self._wait(lambda: text in self.log.read_text())

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)


@contextmanager
def process(log: Path, *arguments: str) -> Iterator[Process]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as stderr:
        popen = subprocess.Popen([sys.executable, *arguments], env=environment, stderr=stderr)
    try:
        yield Process(popen, log)
    finally:
        popen.kill()
        popen.wait()


def replica(*flags: str) -> tuple[str, ...]:
    return ("-m", "hotbranch", "replica", "--kv-tokens", "512", "--threads", "1", *flags)


def test_serves_and_finishes_its_requests_after_a_signal(tmp_path: Path, smollm2: Path) -> None:
    flags = replica("--model", str(smollm2), "--served-name", "tiny")
    with process(tmp_path / "log", *flags) as here:
        address, metrics_address = here.addresses()
        with grpc.insecure_channel(address) as channel:
            stub = ReplicaStub(channel)
            found = stub.Describe(pb.DescribeRequest())
            assert (found.model, found.replica_id) == ("tiny", address)
            assert found.capacity_blocks * found.block_size == 512
            submit = Submit(ticket=1, model="tiny", token_ids=bytes(4 * 40))
            submit.sampling.max_tokens, submit.sampling.ignore_eos = 20, True
            frames = stub.Serve(iter([ClientFrame(submit=[submit])]), timeout=PATIENCE_S)
            deltas = [*next(frames).deltas]
            with urllib.request.urlopen(f"http://{metrics_address}/metrics") as page:
                assert b"hotbranch_replica_running_requests 1.0" in page.read()
            here.popen.send_signal(signal.SIGTERM)
            deltas += [delta for frame in frames for delta in frame.deltas]
        assert sum(len(delta.token_ids) for delta in deltas) == 4 * 20
        assert deltas[-1].finish == FINISH_REASON_LENGTH
        assert here.popen.wait(PATIENCE_S) == 0


def test_a_second_signal_ends_a_replica_whose_engine_hangs(tmp_path: Path) -> None:
    with process(tmp_path / "log", str(ROOT / "tests" / "hung_replica.py")) as here:
        address, _ = here.addresses()
        with grpc.insecure_channel(address) as channel:
            stub = ReplicaStub(channel)
            twice = ClientFrame(submit=[endless(1), endless(1)])
            frames = stub.Serve(iter([twice]), timeout=PATIENCE_S)
            assert "already open" in next(frames).rejections[0].message
            here.popen.send_signal(signal.SIGTERM)
            here.says("draining for")
            assert here.popen.poll() is None
            here.popen.send_signal(signal.SIGTERM)
            assert here.popen.wait(PATIENCE_S) == 0
        assert "the engine hangs" in here.log.read_text()


@pytest.mark.parametrize("flag", ["--grpc-port", "--metrics-port"])
def test_a_taken_port_is_one_line_before_the_model_is_loaded(tmp_path: Path, flag: str) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("not a model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, *replica("--model", str(tmp_path), flag, port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert done.returncode == 2
    assert re.fullmatch(rf"hotbranch replica: .*\b127\.0\.0\.1:{port}\b.*\n", done.stderr)
    assert not done.stdout
