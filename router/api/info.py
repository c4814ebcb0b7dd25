"""The endpoints that say what this router is and how it fares."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

import hotbranch
from router.api.errors import unavailable, unknown_model
from router.api.http import Request, Response
from router.api.tenancy import Tenants
from router.prompt.models import Catalog, Model


@dataclass(frozen=True, slots=True)
class Info:
    """Handlers. `ready` names the models that some replica is ready to serve."""

    catalog: Catalog
    tenants: Tenants
    ready_models: Callable[[], Collection[str]]
    registry: CollectorRegistry

    async def list_models(self, request: Request) -> Response:
        self.tenants.caller(request.headers)
        entries = [_entry(model, adapter) for model, adapter in self.catalog]
        return Response(200, orjson.dumps({"object": "list", "data": entries}))

    async def one_model(self, request: Request) -> Response:
        self.tenants.caller(request.headers)
        found = self.catalog.find(request.tail)
        if found is None:
            raise unknown_model(request.tail)
        return Response(200, orjson.dumps(_entry(*found)))

    async def health(self, request: Request) -> Response:
        return Response(200, b'{"status":"ok"}')

    async def ready(self, request: Request) -> Response:
        ready = sorted(self.ready_models())
        if not ready:
            raise unavailable("no replica is ready", 1)
        return Response(200, orjson.dumps({"status": "ready", "models": ready}))

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(200, encode(self.registry), content_type=content_type)

    async def version(self, request: Request) -> Response:
        return Response(200, orjson.dumps({"version": hotbranch.__version__}))


def _entry(model: Model, adapter: str) -> dict[str, Any]:
    """A model, or an adapter of it, as vLLM lists them."""
    return {
        "id": adapter or model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "hotbranch",
        "root": adapter or model.name,
        "parent": model.name if adapter else None,
        "max_model_len": model.max_context,
    }
