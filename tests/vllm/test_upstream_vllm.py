"""The router in front of vLLM's own server, which tells events, and of one that tells nothing."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_openai import FakeOpenAI, faking
from fleet import Router, Server, stopping, with_group
from overheard import Overheard

from hotbranch.embedded import ensure
from hotbranch.settings import Common

BLOCKS = 40  # of 32 tokens: fewer than the families need
FAMILIES = 10
CHAT = "/v1/chat/completions"
WORDS = ["harbour", "pilot", "orchard", "keeper", "night", "train", "desk", "river", "lantern"]


@dataclass
class Scene:
    vllm: Server
    overheard: Overheard
    router: Router

    @property
    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.router.url, timeout=60)

    def metric(self, name: str, where: str) -> float:
        text = httpx.get(f"{where}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        if where == self.router.url:
            lines = [line for line in lines if f'replica="{self.vllm.name}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def index_is_vllms(self) -> bool:
        return self.router.held(self.vllm.name) == self.overheard.held()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Overheard]]:
    model = ensure(Common().cache_dir)
    scratch = tmp_path_factory.mktemp("vllm")
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS))
    flags += ("--served-model-name", "smollm2", "--enable-prompt-tokens-details")
    server = Server(scratch, model, 1, *flags)
    with stopping(server):
        overheard = Overheard(server.events, "smollm2")
        yield server.ready(), overheard


@asynccontextmanager
async def scene(servers: tuple[Server, Overheard], other: FakeOpenAI) -> AsyncIterator[Scene]:
    vllm, overheard = servers
    async with faking(other):
        first = f"{vllm.url},kv_events={vllm.events},replay={vllm.replay}"
        router = Router([], ["--upstream", first, "--upstream", other.url])
        with stopping(router):
            await asyncio.to_thread(router.ready, 2)
            yield Scene(vllm, overheard, router)


async def until(scene: Scene, seconds: float = 20.0) -> None:
    """Until the index has what vLLM says that it holds."""
    async with asyncio.timeout(seconds):
        while not scene.index_is_vllms():
            await asyncio.sleep(0.05)
    assert not scene.overheard.missed, "the test itself heard everything"


def chat(family: int, question: str, **more: Any) -> dict[str, Any]:
    dice = random.Random(family)
    system = " ".join(dice.choice(WORDS) for _ in range(250))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "smollm2", "messages": messages, "max_tokens": 4, "temperature": 0, **more}


async def test_one_vllm_and_one_server_that_tells_nothing(
    servers: tuple[Server, Overheard],
) -> None:
    """The index equals vLLM's events, block by block, while it evicts; what was predicted is what
    vLLM found; families stay together; bodies and answers are vLLM's own."""
    other = FakeOpenAI(model="smollm2")
    async with scene(servers, other) as here, here.http as http:
        assert [replica["problem"] for replica in here.router.replicas()] == ["", ""]
        delivered = 0

        async def ask(family: int, turn: int) -> str:
            nonlocal delivered
            stream = bool(turn)
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            body = chat(family, f"Question {turn}?", stream=stream, **usage)
            answer = await http.post(CHAT, json=body)
            assert answer.status_code == 200
            home = str(answer.headers["x-hotbranch-replica"])
            if home == here.vllm.name:
                cached = cached_tokens(answer.text, stream)
                assert int(answer.headers["x-hotbranch-predicted-tokens"]) == cached
                delivered += cached
                await until(here)
            return home

        homes = [{await ask(family, turn) for turn in range(2)} for family in range(FAMILIES)]
        assert all(len(home) == 1 for home in homes), homes
        assert set.union(*homes) == {here.vllm.name, other.name}
        other.status = 503  # from here on all is vLLM's
        for family in range(FAMILIES):
            for turn in range(2):
                assert await ask(family, turn) == here.vllm.name
        assert here.overheard.evictions > 0, "or it had room for all"
        assert delivered >= FAMILIES * 256
        assert here.metric("hotbranch_cached_tokens_total", here.router.url) == delivered

        body = chat(99, "And this?")
        direct = await http.post(here.vllm.url + CHAT, json=body)
        answer = await http.post(CHAT, json=body)
        assert answer.headers["x-hotbranch-replica"] == here.vllm.name
        text, own = (a.json()["choices"][0]["message"]["content"] for a in (answer, direct))
        assert text == own
        await until(here)


async def test_a_client_that_leaves_frees_vllm(servers: tuple[Server, Overheard]) -> None:
    other = FakeOpenAI(model="smollm2", status=503)
    async with scene(servers, other) as here, here.http as http:
        body = chat(1, "Tell me all.", stream=True, max_tokens=600, ignore_eos=True)
        async with http.stream("POST", CHAT, json=body) as answer:
            async for _ in answer.aiter_raw():
                break
            assert here.metric("vllm:num_requests_running", here.vllm.url) == 1
        async with asyncio.timeout(5):
            while here.metric("vllm:num_requests_running", here.vllm.url):
                await asyncio.sleep(0.05)
        (replica,) = [r for r in here.router.replicas() if r["replica_id"] == here.vllm.name]
        assert (replica["in_flight"], replica["outstanding_tokens"]) == (0, 0)


async def test_a_router_that_comes_late_and_a_reset(servers: tuple[Server, Overheard]) -> None:
    """Events are replayed to who comes late; a cache that was reset is empty for us, too."""
    other = FakeOpenAI(model="smollm2", status=503)
    async with scene(servers, other) as here, here.http as http:
        await until(here)
        before = here.router.held(here.vllm.name)
        assert len(before) > 10
        assert (await http.post(here.vllm.url + "/reset_prefix_cache")).status_code == 200
        # vLLM tells of it with its next step
        answer = await http.post(CHAT, json=chat(50, "Anybody?"))
        assert answer.headers["x-hotbranch-replica"] == here.vllm.name
        await until(here)
        assert not before & here.router.held(here.vllm.name)


async def test_a_killed_vllm_costs_an_error_event_and_then_nothing(
    servers: tuple[Server, Overheard],
) -> None:
    other = FakeOpenAI(model="smollm2", status=503)
    async with scene(servers, other) as here, here.http as http:
        body = chat(1, "Tell me all.", stream=True, max_tokens=600, ignore_eos=True)
        pieces = []
        async with http.stream("POST", CHAT, json=body) as answer:
            async for piece in answer.aiter_raw():
                pieces.append(piece)
                if len(pieces) == 1:
                    other.status = 200
                    with_group(here.vllm.pid, signal.SIGKILL)
        last = b"".join(pieces).rstrip().rpartition(b"\n\n")[2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "unavailable"
        for family in range(4):
            answer = await http.post(CHAT, json=chat(family, "Anybody?"))
            assert answer.headers["x-hotbranch-replica"] == other.name
        assert here.router.held(here.vllm.name) == set()


def cached_tokens(text: str, stream: bool) -> int:
    """As vLLM counted them."""
    if stream:
        *_, text, _ = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])
