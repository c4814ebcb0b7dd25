"""What an operator can ask the router: its replicas, and what it thinks each of them holds."""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import orjson

from router.api.errors import ApiError
from router.api.http import Request, Response
from router.fleet.holder import Holder
from router.fleet.member import Member, Members
from router.index.branches import Branch
from router.index.index import Index

LIMIT = 10_000  # branches in one answer


class Admin:
    """Handlers for /admin."""

    def __init__(self, fleet: Members[Any], index: Index) -> None:
        self._fleet = fleet
        self._index = index

    async def replicas(self, request: Request) -> Response:
        """GET /admin/replicas: one object for each replica that discovery names."""
        replicas = [self._replica(link) for link in self._fleet.links]
        return Response(200, orjson.dumps({"replicas": replicas}))

    async def index(self, request: Request) -> Response:
        """GET /admin/index/{replica_id or address}: keys that it reported on its GPU, in
        hexadecimal, sorted."""
        for link in self._fleet.links:
            if request.tail in (link.replica_id, link.address):
                held = (self._index.held(holder) for holder in link.holders)
                keys = sorted(frozenset().union(*held))
                body = {
                    "replica_id": link.replica_id,
                    "keys": [f"{key:016x}" for key in keys],
                }
                return Response(200, orjson.dumps(body))
        raise ApiError(404, f"there is no replica {request.tail[:128]!r}", code="not_found")

    async def branches(self, request: Request) -> Response:
        """GET /admin/branches?limit=N: the hottest branches of the index, each with its `parent`.

        Token positions, and tokens a second by replica; never what the tokens are.
        """
        limit = parse_qs(request.query).get("limit", ["100"])[-1]
        if not (
            limit.isascii() and limit.isdecimal() and 0 < int(limit[:6]) <= LIMIT and len(limit) < 6
        ):
            raise ApiError(400, f"limit should be a number from 1 to {LIMIT}", param="limit")
        names = {link.address: link.replica_id for link in self._fleet.links}
        branches = self._index.hottest(int(limit), time.monotonic())
        return Response(200, orjson.dumps({"branches": _listed(branches, names)}))

    def _replica(self, link: Member) -> dict[str, Any]:
        description, load = link.description, link.load
        return {
            "replica_id": link.replica_id,
            "address": link.address,
            "state": link.state,
            "reported_state": link.reported_state,
            "problem": link.problem,
            "model": description.model if description else "",
            "engine": description.engine if description else "",
            "epoch": f"{description.epoch:016x}" if description and description.epoch else "",
            "metrics_address": description.metrics_address if description else "",
            "in_flight": link.in_flight,
            "running": load.running if load else 0,
            "waiting": load.waiting if load else 0,
            "outstanding_tokens": link.outstanding.tokens,
            "used_blocks": load.used_blocks if load else 0,
            "cached_blocks": load.cached_blocks if load else 0,
            "total_blocks": load.total_blocks if load else 0,
            "evicted_blocks": load.evicted_blocks if load else 0,
            "index_blocks": sum(self._index.held_count(holder) for holder in link.holders),
            "recoveries": dict(link.watcher.recoveries),
        }


def _listed(branches: Sequence[Branch], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Parents before children, and flat: a path can be deeper than JSON may nest."""

    def name(holder: Holder) -> str:
        replica = names.get(holder.replica, holder.replica)
        return f"{replica}/{holder.rank}" if holder.rank else replica

    listing: list[dict[str, Any]] = []
    stack = [(branch, "") for branch in reversed(branches)]
    while stack:
        branch, parent = stack.pop()
        key = f"{branch.key:016x}"
        listing.append(
            {
                "key": key,
                "parent": parent,
                "start_token": branch.start,
                "end_token": branch.end,
                "tokens_per_s": round(branch.rate, 3),
                "replicas": {
                    name(holder): {
                        "tokens_per_s": round(branch.rates.get(holder, 0.0), 3),
                        "held_tokens": tokens,
                    }
                    for holder, tokens in branch.held.items()
                },
            }
        )
        stack += [(child, key) for child in reversed(branch.children)]
    return listing
