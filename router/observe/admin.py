"""What an operator can ask the router: its replicas, and what it thinks each of them holds."""

from typing import Any

import orjson

from router.api.errors import ApiError
from router.api.http import Request, Response
from router.fleet.fleet import Fleet
from router.fleet.link import Link
from router.index.index import Index


class Admin:
    """Handlers for /admin."""

    def __init__(self, fleet: Fleet, index: Index) -> None:
        self._fleet = fleet
        self._index = index

    async def replicas(self, request: Request) -> Response:
        """GET /admin/replicas: one object for each replica that discovery names."""
        replicas = [self._replica(link) for link in self._fleet.links]
        return Response(200, orjson.dumps({"replicas": replicas}))

    async def index(self, request: Request) -> Response:
        """GET /admin/index/{replica_id}: the keys reported by it, in hexadecimal, sorted."""
        for link in self._fleet.links:
            if link.replica_id == request.tail:
                keys = sorted(self._index.held(link.address))
                body = {
                    "replica_id": link.replica_id,
                    "keys": [f"{key:016x}" for key in keys],
                }
                return Response(200, orjson.dumps(body))
        raise ApiError(404, f"there is no replica {request.tail[:128]!r}", code="not_found")

    def _replica(self, link: Link) -> dict[str, Any]:
        description, load = link.description, link.load
        return {
            "replica_id": link.replica_id,
            "address": link.address,
            "state": link.state,
            "problem": link.problem,
            "model": description.model if description else "",
            "engine": description.engine if description else "",
            "epoch": f"{description.epoch:016x}" if description else "",
            "metrics_address": description.metrics_address if description else "",
            "in_flight": link.in_flight,
            "running": load.running if load else 0,
            "waiting": load.waiting if load else 0,
            "outstanding_tokens": link.outstanding.tokens,
            "used_blocks": load.used_blocks if load else 0,
            "cached_blocks": load.cached_blocks if load else 0,
            "total_blocks": load.total_blocks if load else 0,
            "evicted_blocks": load.evicted_blocks if load else 0,
            "index_blocks": self._index.held_count(link.address),
        }
