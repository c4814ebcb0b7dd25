"""A router's HTTP front on its real server, over routes made here; shared by the test_api files."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client import CollectorRegistry

from hotbranch.settings import RouterSettings, Tenant
from hotbranch.v1 import serve_pb2 as pb
from router.api.app import App
from router.api.http import Request, Response, Running, serve
from router.generation import Prompt
from router.prompt.models import Catalog, Model, load_model

WORDS = [" one", " two", " three", " four"]


@dataclass
class WordRoute:
    """Says the WORDS round and round, one to each choice in each step."""

    samplings: Sequence[pb.Sampling]
    pause: asyncio.Event
    token: int
    fail_after: int = -1
    replica_id: str = "replica-1"
    predicted_tokens: int = 32
    cached_tokens: int | None = 16
    cancelled: bool = False
    steps: int = 0

    async def deltas(self) -> AsyncIterator[Sequence[tuple[int, pb.Delta]]]:
        longest = max(sampling.max_tokens for sampling in self.samplings)
        for step in range(longest):
            if step:
                await self.pause.wait()
            await asyncio.sleep(0)
            if self.cancelled:
                return
            self.steps += 1
            yield [
                (i, self._delta(sampling, step))
                for i, sampling in enumerate(self.samplings)
                if step < sampling.max_tokens
            ]
            if step == self.fail_after:
                return

    def cancel(self) -> None:
        self.cancelled = True

    def _delta(self, sampling: pb.Sampling, step: int) -> pb.Delta:
        if step == self.fail_after:
            return pb.Delta(finish=pb.FINISH_REASON_ERROR, error="replica lost")
        delta = pb.Delta(token_ids=array("I", [self.token]).tobytes(), text=WORDS[step % 4])
        if step + 1 == sampling.max_tokens:
            delta.finish = pb.FINISH_REASON_LENGTH
        if sampling.HasField("logprobs"):
            top = [self.token, 5][: sampling.logprobs]
            delta.logprobs.add(
                token_id=self.token,
                logprob=-0.5,
                top_ids=top,
                top_logprobs=[-0.5, -1.5][: len(top)],
            )
        return delta


@dataclass
class Fleet:
    """A Dispatcher that keeps what it was asked, and answers as the test wants."""

    token: int
    opened: list[tuple[Prompt, Sequence[pb.Sampling]]] = field(default_factory=list)
    routes: list[WordRoute] = field(default_factory=list)
    error: Exception | None = None
    fail_after: int = -1
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    pause: asyncio.Event = field(default_factory=asyncio.Event)
    waiting_cancelled: bool = False
    cached_tokens: int | None = 16

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.opened, self.routes, self.error, self.fail_after = [], [], None, -1
        self.waiting_cancelled, self.cached_tokens = False, 16
        self.first_token.set()
        self.pause.set()

    async def open(self, prompt: Prompt, samplings: Sequence[pb.Sampling]) -> WordRoute:
        self.opened.append((prompt, samplings))
        if self.error:
            raise self.error
        try:
            await self.first_token.wait()
        except asyncio.CancelledError:
            self.waiting_cancelled = True
            raise
        route = WordRoute(samplings, self.pause, self.token, self.fail_after)
        route.cached_tokens = self.cached_tokens
        self.routes.append(route)
        return route


@dataclass
class Notes:
    """A Recorder that writes everything down."""

    routed_calls: list[tuple[str, int, int, int | None]] = field(default_factory=list)
    tokens: int = 0
    statuses: list[int] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    starts: list[tuple[str, str, str, str]] = field(default_factory=list)

    def started(self, request_id: str, endpoint: str, tenant: str, model: str) -> "Notes":
        self.starts.append((request_id, endpoint, tenant, model))
        return self

    def answered(self, endpoint: str, status: int) -> None:
        self.answers.append((endpoint, status))

    def routed(self, replica: str, prompt: int, predicted: int, cached: int | None) -> None:
        self.routed_calls.append((replica, prompt, predicted, cached))

    def step(self, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, status: int) -> None:
        self.statuses.append(status)


@dataclass
class Site:
    url: str
    running: Running
    app: App
    fleet: Fleet
    notes: Notes
    model: Model
    ready: set[str]
    registry: CollectorRegistry

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=10)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10)


SHARED_KEY, SEALED_KEY = "key-of-shared", "key-of-sealed"
TENANTS = [
    Tenant(name="shared", key_sha256=sha256(SHARED_KEY.encode()).hexdigest()),
    Tenant(name="sealed", key_sha256=sha256(SEALED_KEY.encode()).hexdigest(), isolation="tenant"),
]


@cache
def model(smollm2: Path) -> Model:
    return load_model("smol", smollm2)


async def start(smollm2: Path, **overrides: Any) -> Site:
    fleet, notes, ready, registry = Fleet(280), Notes(), {"smol"}, CollectorRegistry()

    async def hello(request: Request) -> Response:
        return Response(200, b'{"hello":"operator"}')

    def ready_models() -> Collection[str]:
        return ready

    router_settings = RouterSettings.model_validate({"max_body_bytes": 1 << 20, **overrides})
    admin = {"/admin/hello": {"GET": hello}}
    app = App(
        router_settings,
        Catalog({"smol": model(smollm2)}, lambda: {"tuned": "smol"}),
        fleet,
        notes,
        ready_models,
        registry,
        admin,
    )
    listening = await serve(app, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.port}"
    return Site(url, listening, app, fleet, notes, model(smollm2), ready, registry)


@asynccontextmanager
async def running(smollm2: Path, **overrides: Any) -> AsyncIterator[Site]:
    site = await start(smollm2, **overrides)
    yield site
    await site.running.stop(0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def curl(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "-N", "--max-time", "10", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


HELLO: Any = [{"role": "user", "content": "hello"}]
BODY = {"model": "smol", "messages": HELLO, "max_tokens": 3}
