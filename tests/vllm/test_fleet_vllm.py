"""Two replicas with real vLLM behind the router: what it believes, what vLLM delivers and says."""

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from fleet import BLOCK, BLOCKS, ENGINE_ARGS, ON_CPU, Replica, Router, stopping
from overheard import Overheard

from hotbranch.embedded import ensure
from hotbranch.settings import Common
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.replica_pb2_grpc import ReplicaStub

TENANTS = {"alpha": "tenant", "beta": "tenant", "gamma": "shared"}
REQUESTS = 200
FAMILIES = 8
WORDS = (
    "harbour pilot orchard keeper night train conductor desk station note rule hour edition "
    "number river bridge market window letter copper garden winter lantern answer"
)


@dataclass(frozen=True)
class Ask:
    """A request, and what came back."""

    tenant: str
    body: dict[str, object]


@dataclass
class Fleet:
    """The processes, and what is heard of each replica's vLLM."""

    replicas: list[Replica]
    router: Router
    overheard: dict[str, Overheard]

    def index_equals_engines(self) -> None:
        """Once what is under way has arrived."""
        for replica in self.replicas:
            name = f"r{replica.port}"
            own = self.overheard[name]
            until(lambda own=own, name=name: self.router.held(name) == own.held())  # type: ignore[misc]
            assert not own.missed, "the test itself heard everything"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for a condition; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came"
        time.sleep(0.02)
    return time.monotonic() - began


def words(rng: random.Random, count: int) -> str:
    vocabulary = WORDS.split()
    return " ".join(rng.choice(vocabulary) for _ in range(count))


def asks(count: int, seed: int) -> list[Ask]:
    """Families of long shared prefixes, each asked something of its own by any tenant."""
    rng = random.Random(seed)
    systems = [words(random.Random(number), 330) for number in range(FAMILIES)]
    return [
        Ask(
            rng.choice(list(TENANTS)),
            {
                "model": "smollm2",
                "messages": [
                    {"role": "system", "content": rng.choice(systems)},
                    {"role": "user", "content": words(rng, rng.randrange(20, 90))},
                ],
                "max_tokens": 6,
                "temperature": 0,
            },
        )
        for _ in range(count)
    ]


async def play(url: str, asked: list[Ask], at_once: int) -> list[httpx.Response]:
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=200) as client:

        async def one(ask: Ask) -> httpx.Response:
            async with gate:
                key = {"authorization": f"Bearer sk-{ask.tenant}"}
                return await client.post("/v1/chat/completions", json=ask.body, headers=key)

        return await asyncio.gather(*map(one, asked))


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    scratch = tmp_path_factory.mktemp("fleet")
    config = scratch / "tenants.yaml"
    tenants = [
        {
            "name": name,
            "key_sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(),
            "isolation": isolation,
        }
        for name, isolation in TENANTS.items()
    ]
    config.write_text(yaml.safe_dump({"tenants": tenants}))
    cpus = sorted(os.sched_getaffinity(0))
    replicas = [Replica(Path(f"/tmp/hb{os.getpid()}{n}"), cpus[n % len(cpus)]) for n in range(2)]
    with stopping(*replicas):
        overheard = {f"r{r.port}": Overheard(r.ready().events, "smollm2") for r in replicas}
        router = Router([r.address for r in replicas], ["--config", str(config)])
        with stopping(router):
            yield Fleet(replicas, router.ready(2), overheard)


@pytest.mark.timeout(900)
async def test_the_index_is_what_vllm_holds(fleet: Fleet) -> None:
    """Under constant eviction, with tenants that share and tenants that do not."""
    asked = asks(REQUESTS, seed=1)
    answers = await play(fleet.router.url, asked, at_once=8)
    assert {answer.status_code for answer in answers} == {200}
    fleet.index_equals_engines()
    assert all(own.evictions > BLOCKS // 2 for own in fleet.overheard.values())
    served = {answer.headers["x-hotbranch-replica"] for answer in answers}
    assert served == set(fleet.overheard), "both replicas have worked"
    # What was free is what vLLM itself counts, all in all.
    hits = sum(replica.metric("vllm:prefix_cache_hits_total") for replica in fleet.replicas)
    assert sum(map(cached, answers)) == hits > 0
    assert all(cached(a) == int(a.headers["x-hotbranch-cached-tokens"]) for a in answers)
    loads = fleet.router.replicas()
    assert all(load["in_flight"] == load["outstanding_tokens"] == 0 for load in loads)


@pytest.mark.timeout(600)
async def test_each_request_is_told_what_vllm_found(fleet: Fleet) -> None:
    for ask in asks(12, seed=2):
        before = {f"r{r.port}": r.metric("vllm:prefix_cache_hits_total") for r in fleet.replicas}
        (answer,) = await play(fleet.router.url, [ask], at_once=1)
        name = answer.headers["x-hotbranch-replica"]
        (replica,) = (r for r in fleet.replicas if f"r{r.port}" == name)
        assert cached(answer) == replica.metric("vllm:prefix_cache_hits_total") - before[name]


DIRECT = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(open(sys.argv[1]))
llm = LLM(**given["engine"])
prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
json.dump([output.outputs[0].text for output in outputs], open(sys.argv[2], "w"))
"""


@pytest.mark.timeout(600)
async def test_greedy_text_is_vllms_own(fleet: Fleet, tmp_path: Path) -> None:
    """Behind reuse, eviction, priorities and a router, it is the text of vLLM alone."""
    asked = asks(16, seed=3)
    answers = await play(fleet.router.url, asked, at_once=8)
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    prompts = []
    async with httpx.AsyncClient(base_url=fleet.router.url) as client:
        for ask in asked:
            key = {"authorization": f"Bearer sk-{ask.tenant}"}
            reply = await client.post("/tokenize", json=ask.body, headers=key)
            prompts.append(reply.raise_for_status().json()["tokens"])
    engine: dict[str, object] = {k: yaml.safe_load(v) for k, v in ENGINE_ARGS.items()}
    engine |= {"model": str(ensure(Common().cache_dir)), "dtype": "float32", "max_model_len": 4096}
    (tmp_path / "given").write_text(json.dumps({"engine": engine, "prompts": prompts}))
    command = [sys.executable, "-c", DIRECT, str(tmp_path / "given"), str(tmp_path / "texts")]
    subprocess.run(command, env=os.environ | ON_CPU, check=True, timeout=400)
    assert json.loads((tmp_path / "texts").read_text()) == texts


@pytest.mark.timeout(300)
async def test_a_reset_purges_at_once_also_while_requests_run(fleet: Fleet) -> None:
    replica = fleet.replicas[0]
    name = f"r{replica.port}"
    plain = [Ask("gamma", ask.body | {"max_tokens": 96}) for ask in asks(8, seed=4)]
    before = await play(fleet.router.url, plain, at_once=8)
    assert name in {answer.headers["x-hotbranch-replica"] for answer in before}
    async with grpc.aio.insecure_channel(replica.address) as channel:
        stub = ReplicaStub(channel)
        epoch = (await stub.Describe(pb.DescribeRequest())).epoch
        running = asyncio.create_task(play(fleet.router.url, plain, at_once=8))
        # vLLM tells of a reset with its next step alone: one must be to come.
        while not replica.metric("vllm:num_requests_running"):
            assert not running.done(), "none of them was seen to run"
            await asyncio.sleep(0.02)
        known = fleet.router.held(name)
        assert known
        began = time.monotonic()
        flushing = stub.Flush(pb.FlushRequest())
        while await asyncio.to_thread(fleet.router.held, name) & known:
            assert time.monotonic() - began < 1.0
        assert (await flushing).epoch != epoch
    after = await running
    assert {answer.status_code for answer in after} == {200}
    contents = [[a.json()["choices"][0]["message"]["content"] for a in x] for x in (before, after)]
    assert contents[0] == contents[1], "what ran when it came is computed anew, to the same end"
    await play(fleet.router.url, plain[:2], at_once=2)
    fleet.index_equals_engines()


@pytest.mark.timeout(400)
async def test_a_killed_engine_is_purged_at_once_and_comes_back(fleet: Fleet) -> None:
    """Its core dies; the replica says so, ends, and its successor begins with nothing."""
    replica = fleet.replicas[1]
    name = f"r{replica.port}"
    await play(fleet.router.url, asks(8, seed=5), at_once=8)
    assert fleet.router.held(name)
    os.killpg(replica.pid, signal.SIGKILL)
    assert until(lambda: not fleet.router.held(name)) < 1.0
    answers = await play(fleet.router.url, asks(4, seed=6), at_once=4)
    assert {answer.status_code for answer in answers} == {200}, "the other one serves"
    again = Replica(Path(f"{replica.scratch}x"), None, replica.port)
    with stopping(again):
        fleet.overheard[name] = Overheard(again.ready().events, "smollm2")
        fleet.replicas[1] = again
        fleet.router.ready(2)
        answers = await play(fleet.router.url, asks(24, seed=7), at_once=8)
        assert {answer.headers["x-hotbranch-replica"] for answer in answers} == set(fleet.overheard)
        fleet.index_equals_engines()
    assert BLOCK == 32
