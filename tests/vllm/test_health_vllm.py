"""A replica whose vLLM does not start, dies or hangs: its state and its exit status."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet import BLOCKS, Replica, stopping
from test_replica_vllm import submission

from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import ClientFrame, Sampling

PATIENCE_S = 150.0


def describe(replica: Replica) -> pb.Description | None:
    with grpc.insecure_channel(replica.address) as channel:
        try:
            return ReplicaStub(channel).Describe(pb.DescribeRequest(), timeout=5)
        except grpc.RpcError:
            return None


class Watch:
    """The states that a replica says it is in, one after another, and what it says of them."""

    def __init__(self, replica: Replica) -> None:
        self.states: list[str] = []
        self.problem = ""
        self._replica = replica
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._replica.process.poll() is None:
            here = describe(self._replica)
            if here is not None:
                name = pb.State.Name(here.state)
                if name not in self.states[-1:]:
                    self.states.append(name)
                self.problem = here.problem or self.problem
            time.sleep(0.05)


def occupied(replica: Replica) -> Iterator[None]:
    """A request that does not end."""
    endless = submission(range(2000, 2100), sampling=Sampling(max_tokens=3900, ignore_eos=True))
    with grpc.insecure_channel(replica.address) as channel:
        yield from ReplicaStub(channel).Serve(iter([ClientFrame(submit=[endless])]))


@pytest.mark.timeout(500)
def test_an_engine_that_dies_and_its_successor(tmp_path: Path) -> None:
    scratch = Path(f"/tmp/hb{os.getpid()}k")
    first = Replica(scratch)
    with stopping(first):
        watch = Watch(first)
        first.ready()
        epoch = (describe(first) or pb.Description()).epoch
        os.kill(first.core(), signal.SIGKILL)
        assert first.wait(PATIENCE_S) == 1
    assert watch.states == ["STATE_LOADING", "STATE_SERVING", "STATE_DEAD"]
    assert "died" in watch.problem
    second = Replica(Path(f"{scratch}2"), port=first.port)
    with stopping(second):
        second.ready()
        again = describe(second)
    assert again is not None and again.epoch not in (0, epoch)


@pytest.mark.timeout(500)
def test_an_engine_that_hangs_with_work(tmp_path: Path) -> None:
    replica = Replica(Path(f"/tmp/hb{os.getpid()}h"), flags=["--step-timeout-s", "8"])
    with stopping(replica):
        watch = Watch(replica)
        replica.ready()
        frames = occupied(replica)
        next(frames)
        assert replica.metric('hotbranch_replica_state{state="serving"}') == 1
        os.kill(replica.core(), signal.SIGSTOP)
        assert replica.wait(PATIENCE_S) == 1
    assert watch.states == ["STATE_LOADING", "STATE_SERVING", "STATE_HUNG"]
    assert "step" in watch.problem


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "engine_args", "state", "status"),
    [
        (["--model", "{model}"], {}, "STATE_MODEL_NOT_FOUND", 2),
        ([], {"num_gpu_blocks_override": str(BLOCKS // 4)}, "STATE_OUT_OF_MEMORY", 3),
        ([], {"enforce_eagr": "true"}, "STATE_START_FAILED", 2),
        ([], {"tool_call_parser": "no_such"}, "STATE_START_FAILED", 2),
    ],
    ids=["no weights", "no room for a context", "a slip", "no such parser"],
)
def test_an_engine_that_does_not_start(
    smollm2: Path,
    tmp_path: Path,
    flags: list[str],
    engine_args: dict[str, str],
    state: str,
    status: int,
) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(smollm2 / name)
    given = [flag.format(model=model) for flag in flags]
    replica = Replica(Path(f"/tmp/hb{os.getpid()}n"), flags=given, **engine_args)
    with stopping(replica):
        watch = Watch(replica)
        assert replica.wait(PATIENCE_S) == status
    assert watch.states == ["STATE_LOADING", state]
    said = [line for line in replica.lines if line.startswith("hotbranch replica: ")]
    assert len(said) == 1
    assert watch.problem in said[0]
