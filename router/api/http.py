"""HTTP as plain data, and the one module that knows the server underneath (granian's RSGI).

An application is a coroutine from Request to Response. Another server would replace this module's
`serve` and `_Adapter` and nothing else.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from granian.rsgi import ProtocolClosed, ProtocolError  # type: ignore[attr-defined]
from granian.server.embed import Server

from hotbranch.ports import free_address
from router.api.errors import STOPPING, ApiError, too_large

BODY_S = 60.0  # a client has this long to send its body
START_S = 10.0  # the server has this long to listen


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose body has been read. `client` is the peer's address without the port.

    `tail` is what follows the path of a route that ends in a slash.
    """

    method: str
    path: str
    headers: "Headers"
    client: str
    request_id: str
    body: bytes = b""
    tail: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. A body that is an iterator is streamed, one write for each piece it yields.

    `cut` is what a stream is closed with when the server has to end it early. `more` are further
    headers, which may repeat. Without a `content_type` there is no such header.
    """

    status: int
    body: bytes | AsyncGenerator[bytes, None] = b""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    cut: bytes = b""
    more: Sequence[tuple[str, str]] = ()


class Headers(Protocol):
    """Request headers, by lower-case name."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def items(self) -> Iterable[tuple[str, str]]: ...


class Application(Protocol):
    """What a server calls. `respond` is cancelled as soon as its client is gone."""

    max_body_bytes: int

    def identify(self, headers: Headers) -> str:
        """The id of a request, from its headers or a new one."""

    def failed(self, request_id: str, error: ApiError) -> Response:
        """The answer to a request whose body could not be read."""

    async def respond(self, request: Request) -> Response: ...


class Running:
    """A listening server."""

    def __init__(self, server: Server, adapter: "_Adapter", task: "asyncio.Task[None]") -> None:
        self._server = server
        self._adapter = adapter
        self._task = task
        self.port: int = server.bind_port

    async def stop(self, drain_s: float) -> None:
        """Answer 503 to new requests, let open ones finish for `drain_s` seconds, then end them."""
        self._adapter.draining = True
        if self._adapter.open:
            await asyncio.wait(self._adapter.open, timeout=drain_s)
        for work in self._adapter.open:
            work.cancel()
        self._server.stop()  # type: ignore[no-untyped-call]
        await self._task


async def serve(app: Application, host: str, port: int) -> Running:
    """Listen on `host:port`; port 0 picks a free one, `Running.port` is the chosen one.

    Raises OSError naming the address when it cannot be had.
    """
    adapter = _Adapter(app)
    server = Server(
        adapter,
        *free_address(host, port),
        log_enabled=False,
        websockets=False,
        backlog=2048,
    )
    task = asyncio.create_task(server.serve())
    await adapter.wait_started(task)
    return Running(server, adapter, task)


class _Adapter:
    """Between granian's protocol objects and an Application."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._started = asyncio.Event()
        self.draining = False
        self.open: set[asyncio.Task[None]] = set()

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started.set()

    async def wait_started(self, server: "asyncio.Task[None]") -> None:
        started = asyncio.create_task(self._started.wait())
        done, _ = await asyncio.wait(
            {started, server}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if started not in done:
            started.cancel()
            server.cancel()
            raise OSError("the HTTP server did not start")

    async def __rsgi__(self, scope: Any, proto: Any) -> None:
        try:
            request = await self._request(scope, proto)
        except ApiError as error:
            answer = self._app.failed(self._app.identify(scope.headers), error)
            _send(proto, answer, close=True)
            return
        except (ProtocolClosed, ProtocolError):
            return
        work = asyncio.create_task(self._answer(request, proto))
        self.open.add(work)
        work.add_done_callback(self.open.discard)
        gone = asyncio.ensure_future(proto.client_disconnect())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _request(self, scope: Any, proto: Any) -> Request:
        headers = scope.headers
        request_id = self._app.identify(headers)
        if self.draining:
            raise STOPPING
        body = b""
        if scope.method in ("POST", "PUT", "PATCH", "DELETE"):
            try:
                async with asyncio.timeout(BODY_S):
                    body = await _read(proto, self._app.max_body_bytes)
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s") from None
        client, _, _ = scope.client.rpartition(":")
        return Request(
            scope.method,
            scope.path,
            headers,
            client,
            request_id,
            body,
            query=scope.query_string,
        )

    async def _answer(self, request: Request, proto: Any) -> None:
        try:
            response = await self._app.respond(request)
        except asyncio.CancelledError:
            if self.draining:
                _send(proto, self._app.failed(request.request_id, STOPPING), close=True)
            raise
        if isinstance(response.body, bytes):
            _send(proto, response)
        else:
            await self._stream(response, response.body, proto)

    async def _stream(
        self, response: Response, body: AsyncGenerator[bytes, None], proto: Any
    ) -> None:
        with contextlib.suppress(ProtocolClosed, ProtocolError):
            async with contextlib.aclosing(body):
                # The first piece comes before the response is begun: the body always gets to run,
                # and so to clean up behind itself.
                transport = None
                try:
                    async for piece in body:
                        if transport is None:
                            transport = proto.response_stream(response.status, _headers(response))
                        await transport.send_bytes(piece)
                    if transport is None:
                        _send(proto, replace(response, body=b""))
                except asyncio.CancelledError:
                    if self.draining and transport is not None:
                        await transport.send_bytes(response.cut)
                    raise


async def _read(proto: Any, limit: int) -> bytes:
    """The body. One over the limit is read on, unkept, as far again, so that a client that sends
    before it listens still gets its answer."""
    chunks, size = [], 0
    async for chunk in proto:
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
            if size > 2 * limit:
                break
    if size > limit:
        raise too_large(limit)
    return b"".join(chunks)


def _send(proto: Any, response: Response, close: bool = False) -> None:
    headers = _headers(response)
    if close:
        headers.append(("connection", "close"))
    proto.response_bytes(response.status, headers, response.body)


def _headers(response: Response) -> list[tuple[str, str]]:
    kind = [("content-type", response.content_type)] if response.content_type else []
    return [*kind, *response.headers.items(), *response.more]
