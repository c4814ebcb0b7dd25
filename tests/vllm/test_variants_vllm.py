"""Replicas with real vLLM in other forms: LoRA adapters, data-parallel ranks."""

import json
import os
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch
from fleet import Replica, stopping
from safetensors.torch import save_file
from test_replica_vllm import ask, prompt, submission

from hotbranch.embedded import ensure
from hotbranch.keys import block_keys, root
from hotbranch.settings import Common
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import Run, WatchRequest
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import Rejection

RANK = 8


def adapter(directory: Path) -> Path:
    """A LoRA that changes what the model says: random, on the query projections."""
    config = json.loads((ensure(Common().cache_dir) / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    torch.manual_seed(1)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        weights[f"{name}_A.weight"] = torch.randn(RANK, hidden)
        weights[f"{name}_B.weight"] = torch.randn(hidden, RANK)
    directory.mkdir()
    save_file(weights, str(directory / "adapter_model.safetensors"))
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory


async def snapshot(stub: ReplicaStub) -> list[Run]:
    runs: list[Run] = []
    async for update in stub.WatchCache(WatchRequest()):
        if update.HasField("snapshot"):
            runs += update.snapshot.runs
            if update.snapshot.last:
                return runs
    raise AssertionError("the stream ended")


def keys(tokens: Sequence[int], name: str = "") -> set[int]:
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    return set(block_keys(data, 32, root("smollm2", name, "")))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    directory = adapter(tmp_path_factory.mktemp("lora") / "support")
    running = Replica(
        Path(f"/tmp/hb{os.getpid()}l"), adapters=json.dumps({"support": str(directory)})
    )
    with stopping(running):
        yield running.ready()


@pytest.mark.timeout(400)
async def test_an_adapter_is_served_by_name_with_a_cache_of_its_own(tuned: Replica) -> None:
    tokens = prompt(1, 100)
    async with grpc.aio.insecure_channel(tuned.address) as channel:
        stub = ReplicaStub(channel)
        here = await stub.Describe(pb.DescribeRequest())
        assert list(here.adapters) == ["support"]
        (plain,) = await ask(stub, submission(tokens))
        (first,) = await ask(stub, submission(tokens, adapter="support"))
        (again,) = await ask(stub, submission(tokens, adapter="support"))
        assert (plain.cached, first.cached, again.cached) == (0, 0, 96)
        assert first.tokens == again.tokens != plain.tokens
        held = {key for run in await snapshot(stub) for key in run.keys}
        assert keys(tokens) | keys(tokens, "support") <= held
        (other,) = await ask(stub, submission(tokens, adapter="sales"))
        assert other.rejection is not None
        assert other.rejection.reason == Rejection.REASON_INVALID


@pytest.fixture(scope="module")
def ranked() -> Iterator[Replica]:
    running = Replica(Path(f"/tmp/hb{os.getpid()}d"), data_parallel_size="2")
    with stopping(running):
        yield running.ready()


@pytest.mark.timeout(600)
async def test_each_rank_is_a_cache_of_its_own(ranked: Replica) -> None:
    tokens = random.Random(3).sample(range(1000, 40000), 100)
    async with grpc.aio.insecure_channel(ranked.address) as channel:
        stub = ReplicaStub(channel)
        assert (await stub.Describe(pb.DescribeRequest())).ranks == 2
        (first,) = await ask(stub, submission(tokens, rank=1))
        (other,) = await ask(stub, submission(tokens, rank=0))
        (again,) = await ask(stub, submission(tokens, rank=1))
        assert (first.cached, other.cached, again.cached) == (0, 0, 96)
        (last,) = await ask(stub, submission(prompt(4, 100), rank=1))
        assert last.cached == 0
        runs = await snapshot(stub)
        held = [{key for run in runs if run.rank == rank for key in run.keys} for rank in (0, 1)]
        assert keys(tokens) <= held[0] & held[1]
        assert keys(prompt(4, 100)) <= held[1] - held[0]
