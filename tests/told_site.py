"""A whole router, HTTP to gRPC, over replicas that say what a test tells them to."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from test_fleet import ListedDiscovery, eventually
from told_replica import ToldReplica, told_replica

from hotbranch.fingerprint import fingerprint
from hotbranch.settings import RouterSettings
from hotbranch.v1.serve_pb2 import FINISH_REASON_STOP, Delta, Submit, ToolCall
from router.main import Router

PLAIN: Mapping[str, Any] = {"engine": "radix"}
ABLE: Mapping[str, Any] = {"engine": "vllm", "structures": True, "parses": True}


@dataclass
class ToldSite:
    """`a`, `b` and so on are the replicas' names."""

    router: Router
    discovery: ListedDiscovery
    told: Sequence[ToldReplica]
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    @property
    def submits(self) -> list[Submit]:
        """All that the replicas were sent."""
        return [submit for told in self.told for submit in told.submits]

    def says(self, *script: Delta) -> None:
        for told in self.told:
            told.script = script

    async def leaves(self, told: ToldReplica) -> None:
        """Discovery drops a replica, and the router has noticed."""
        kept = [other.address for other in self.told if other is not told]
        self.discovery.set(*kept)
        await eventually(lambda: len(self.router.fleet.links) == len(kept))


@asynccontextmanager
async def told_site(smollm2: Path, *described: Mapping[str, Any]) -> AsyncIterator[ToldSite]:
    """A replica for each description."""
    ours = {"tokenizer_fingerprint": fingerprint(smollm2), "model": "smol", "vocab_size": 49152}
    discovery = ListedDiscovery()
    settings = RouterSettings(model=str(smollm2), served_name="smol", port=0)
    router = Router(settings, discovery)
    await router.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.stop, 0)
        told = [
            await stack.enter_async_context(told_replica(name, **{**ours, **fields}))
            for name, fields in zip("abcdef", described, strict=False)
        ]
        discovery.set(*(replica.address for replica in told))
        await eventually(lambda: len(router.fleet.ready("smol")) == len(told))
        url = f"http://{router.address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        )
        yield ToldSite(router, discovery, told, http, client)


def said(text: str = "", **fields: Any) -> Delta:
    """What one step adds to a reply, one token."""
    return Delta(token_ids=bytes(4), text=text, **fields)


def call(index: int, arguments: str, name: str = "") -> Delta:
    """A piece of a tool call; with its name comes its id."""
    id = f"call-{index}" if name else ""
    piece = ToolCall(index=index, id=id, name=name, arguments=arguments)
    return said(tool_calls=[piece])


END = Delta(finish=FINISH_REASON_STOP)
