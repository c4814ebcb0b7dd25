"""A Serve application as `ray.serve.llm` builds them, but with a model that only counts seconds.

An ingress calls LLM deployments through handles; the routers under test live in its process. It is
a program, for Ray forks: `python tests/ray_llm_app.py PORT MODEL` prints `ready` and ends with its
standard input.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

ROUTER = "deploy.ray_llm.router:HotbranchRouter"
FULL = 16  # requests that a replica takes at a time


class ChatCompletionRequest(BaseModel):
    """As `ray.serve.llm` hands it to its router."""

    model_config = ConfigDict(extra="allow")

    model: str = "m"
    messages: Any = None


class Llm:
    """Answers with who it is, then waits `seconds`, then says that it is done."""

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        yield f"{os.getpid()}\n"
        extra = getattr(request, "model_extra", None) or {}
        await asyncio.sleep(extra.get("seconds", 0))
        if extra.get("fails"):
            raise ValueError("as it was told to")
        yield "done\n"


class Ingress:
    """`/NAME/chat` calls a deployment with the body, `/NAME/fan` as often as it has items, at the
    same time; `/NAME/router` tells how its router stands."""

    def __init__(self, **handles: DeploymentHandle) -> None:
        self._handles = {name: handle.options(stream=True) for name, handle in handles.items()}

    async def __call__(self, request: Request) -> Response:
        _, name, what = request.url.path.split("/")
        handle = self._handles[name]
        if what == "router":
            router = handle._router._asyncio_router.request_router
            state = {
                "loads": router._placer.loads,
                "leases": len(router._placer._leases),
                "placements": router.placements,
                "degraded": router.degraded,
            }
            return JSONResponse(state)
        body = await request.json()
        if what == "fan":
            return JSONResponse(await asyncio.gather(*(self._whole(handle, one) for one in body)))
        return StreamingResponse(self._chat(handle, body))

    async def _chat(self, handle: DeploymentHandle, body: Any) -> AsyncIterator[str]:
        async for text in handle.chat.remote(as_request(body), None):
            yield text

    async def _whole(self, handle: DeploymentHandle, body: Any) -> str:
        return "".join([text async for text in self._chat(handle, body)])


def as_request(body: Any) -> Any:
    """A body with messages as the pydantic model that it would be, else as it is."""
    if isinstance(body, dict) and "messages" in body:
        return ChatCompletionRequest(**body)
    return body


def main(port: int, model: str) -> None:
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=80 << 20)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))

    def llm(name: str, replicas: int, **options: Any) -> serve.Application:
        deployment = serve.deployment(
            num_replicas=replicas,
            max_ongoing_requests=FULL,
            ray_actor_options={"num_cpus": 0.1},
            health_check_period_s=1.0,
            graceful_shutdown_timeout_s=0.1,
            **options,
        )(Llm)
        return deployment.options(name=name).bind()

    def routed(**kwargs: Any) -> RequestRouterConfig:
        return RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs=kwargs)

    ingress = serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000)(
        Ingress
    )
    app = ingress.bind(
        ours=llm("ours", 3, request_router_config=routed(model=model, kv_tokens=100_000)),
        wrong=llm("wrong", 2, request_router_config=routed(model="/nowhere", kv_token=1)),
        default=llm("default", 2),
    )
    serve.run(app)
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
