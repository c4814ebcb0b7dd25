"""A router in front of fake OpenAI servers; shared by the test_upstream files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from api_site import until
from fake_openai import FakeOpenAI
from prometheus_client.parser import text_string_to_metric_families

from hotbranch.settings import RouterSettings
from router.fleet.discovery import StaticDiscovery
from router.fleet.link import State
from router.main import Router
from router.prompt.models import load_model

_load_once = cache(load_model)  # a model takes a second
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


class Front:
    """A router over some servers, and a client of it."""

    def __init__(self, router: Router, http: httpx.AsyncClient) -> None:
        self.router = router
        self.http = http
        self.url = f"http://{router.address}"

    async def ask(self, *texts: str, stream: bool = True, **fields: Any) -> httpx.Response:
        roles = ["system", "user"] if len(texts) > 1 else ["user"]
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        body = {"model": "smol", "messages": messages, "stream": stream, **fields}
        return await self.http.post(CHAT, json=body)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def replicas(self) -> list[dict[str, Any]]:
        return list((await self.http.get("/admin/replicas")).json()["replicas"])

    @property
    def in_flight(self) -> list[int]:
        return [link.in_flight for link in self.router.fleet.links]

    @property
    def states(self) -> list[State]:
        return [link.state for link in self.router.fleet.links]


@asynccontextmanager
async def front(
    smollm2: Path, *servers: FakeOpenAI, options: str = "", ready: int = -1, **settings: Any
) -> AsyncIterator[Front]:
    """The servers run already, and so many of them will be ready."""
    upstream = [server.url + options for server in servers]
    given = {"model": str(smollm2), "served_name": "smol", "port": 0, "upstream": upstream}
    router_settings = RouterSettings.model_validate({**given, **settings})
    with patch("router.main.load_model", _load_once):
        router = Router(router_settings, StaticDiscovery([]), router_settings.upstream)
    await router.start()
    wanted = len(servers) if ready < 0 else ready
    async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=10) as http:
        try:
            await until(
                lambda: sum(link.state is State.READY for link in router.fleet.links) == wanted
            )
            yield Front(router, http)
        finally:
            await router.stop(0)


async def other_home(here: Front, servers: Sequence[FakeOpenAI]) -> tuple[str, FakeOpenAI]:
    """A prompt, and the server that has it."""
    text = "Tell me all about it, please. " * 60
    answer = await here.ask(text)
    return text, next(s for s in servers if s.name == answer.headers["x-hotbranch-replica"])
