"""A plain OpenAI-compatible server that says what a test wants, byte for byte, and notes what came.

It has no replica, no events, and no more endpoints than a test gives it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

CHUNKS = [
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"c1","choices":[{"delta":{"content":"\\u00e9\\ud83d\\ude42"}, "index":0 }]}\n\n',
    b'data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Came:
    """A request as it arrived."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass
class FakeOpenAI:
    """`chunks` answer what streams, `whole` what does not. `gate` holds answers back, `pause` what
    follows their first chunk. `status` other than 200 answers with `error`. `cut` breaks a stream
    off behind so many chunks."""

    model: str = "smol"
    cards: list[dict[str, Any]] | None = None
    chunks: Sequence[bytes] = tuple(CHUNKS)
    whole: bytes = b'{"choices":[]}'
    error: bytes = b'{"error":"as it is"}'
    answer_headers: Sequence[tuple[str, str]] = ()
    status: int = 200
    cut: int | None = None
    endpoints: dict[str, Handler] = field(default_factory=dict)
    key: str = ""
    came: list[Came] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    left: int = 0  # clients that went before their answer was whole
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    pause: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.pause.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on `port`, or on a free one."""
        application = web.Application(client_max_size=64 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """As a process that is killed: connections are cut."""
        server = self._runner.server
        if server is None:
            return
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401, body=b"who?")
        if path in self.endpoints:
            return await self.endpoints[path](request)
        if path == "/v1/models":
            cards = self.cards or [{"id": self.model, "object": "model", "owned_by": "fake"}]
            return web.Response(body=orjson.dumps({"object": "list", "data": cards}))
        if path == "/health":
            return web.Response()
        if not path.startswith("/v1/"):
            return web.Response(status=404, body=b"nothing here")
        body = await request.read()
        self.came.append(Came(request.method, request.path_qs, _pairs(request), body))
        return await self._answer(request, b'"stream":true' in body.replace(b" ", b""))

    async def _answer(self, request: web.Request, stream: bool) -> web.StreamResponse:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await self.gate.wait()
            if self.status != 200:
                return web.Response(status=self.status, body=self.error)
            if stream:
                return await self._stream(request)
            response = web.Response(body=self.whole, content_type="application/json")
            for name, value in self.answer_headers:
                response.headers.add(name, value)
            return response
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if self.cut == 0:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.prepare(request)
        for number, chunk in enumerate(self.chunks):
            if number == self.cut:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(chunk)
            await self.pause.wait()
        return response


def _pairs(request: web.Request) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in request.raw_headers]


@asynccontextmanager
async def faking(*servers: FakeOpenAI) -> AsyncIterator[None]:
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()
