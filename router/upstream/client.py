"""HTTP to one upstream: what is passed on, byte for byte, and what we ask ourselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from yarl import URL

from router.generation import Forward

CONNECT_S = 2.0
KEEP_S = 2.0  # of an idle connection: less than servers keep it (uvicorn: 5 s)
RANK_HEADER = "x-data-parallel-rank"  # vLLM's
# Of one connection, not of what it carries (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
    *("te", "trailer", "transfer-encoding", "upgrade", "expect"),
}
OURS = {"host", "content-length"}  # the client writes them anew


class Client:
    """Of the server at `url`, which has so many `ranks`. `key` replaces the clients' authorization,
    unless it is empty. Needs a running event loop. All raise what aiohttp raises."""

    def __init__(self, url: str, ranks: int, key: str) -> None:
        self._url = url
        self._ranks = ranks
        self._own = {"authorization": f"Bearer {key}"} if key else {}
        self._http = _session()

    async def send(self, forward: Forward, rank: int) -> aiohttp.ClientResponse:
        """The head of the answer. A server may close an idle connection in the moment that we use
        it: it has not seen the request then, and gets it on another one."""
        drop = OURS | self._own.keys()
        headers = [pair for pair in end_to_end(forward.headers) if pair[0].lower() not in drop]
        headers += self._own.items()
        if self._ranks > 1:
            headers.append((RANK_HEADER, str(rank)))
        url = URL(self._url + forward.target, encoded=True)
        while True:
            reused: list[bool] = []
            try:
                return await self._http.request(
                    forward.method,
                    url,
                    headers=headers,
                    data=forward.body or None,
                    allow_redirects=False,
                    trace_request_ctx=reused,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not reused:
                    raise

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        async with self._http.get(self._url + path, headers=self._own) as answer:
            return answer.status, await answer.read()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON body."""
        headers = {**self._own, "content-type": "application/json"}
        data = orjson.dumps(body)
        async with self._http.post(self._url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.read()

    async def close(self) -> None:
        await self._http.close()


def end_to_end(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers without those that are of the connection."""
    drop = set(HOP_BY_HOP)
    for name, value in headers:
        if name.lower() == "connection":
            drop |= {one.strip().lower() for one in value.split(",")}
    return [(name, value) for name, value in headers if name.lower() not in drop]


def _session() -> aiohttp.ClientSession:
    """It adds nothing to what it is given to send, and decodes nothing that it receives."""
    trace = aiohttp.TraceConfig()

    async def reused(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.append(True)

    trace.on_connection_reuseconn.append(reused)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
        trace_configs=[trace],
    )
