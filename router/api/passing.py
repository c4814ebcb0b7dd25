"""The API in front of upstreams: requests and answers pass as they are, placed by their prompts."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from urllib.parse import quote

from hotbranch.keys import TOKEN_BYTES
from hotbranch.settings import GatewaySettings
from router.api import reading
from router.api.errors import STOPPING, ApiError, unavailable
from router.api.fields import Fields
from router.api.generate import CLIENT_LEFT, log_crash
from router.api.http import Request, Response
from router.api.inference import OFF_LOOP_BYTES, session_of
from router.api.reading import CHAT, COMPLETIONS, Reading, Unread, guessed_tokens
from router.api.recorder import Recorder, Recording
from router.api.sse import failure
from router.api.tenancy import Caller, Tenants
from router.generation import Exchange, Forward, Forwarder, Named, Prompt, Unavailable
from router.prompt.models import Models

UNKNOWN = "unknown"  # model, as a label
STREAM = "text/event-stream"
OURS = ("content-type", "x-request-id")  # headers that the server sets in a place of their own
WORK = (
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"),
    *("/generate", "/inference/v1/generate", "/pooling", "/classify", "/score", "/rerank"),
)
LITTLE = ("/tokenize", "/detokenize")
ONE_SERVER = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

Handler = Callable[[Request], Awaitable[Response]]


class Passing:
    """Handlers."""

    def __init__(
        self,
        models: Models,
        settings: GatewaySettings,
        forwarder: Forwarder,
        recorder: Recorder,
    ) -> None:
        self.open = 0
        self._models = models
        self._tenants = Tenants(settings.tenants)
        self._forwarder = forwarder
        self._recorder = recorder
        self._max_open = settings.max_open
        self._deadline_s = settings.deadline_s

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """As of `router.api.app.Routes`."""
        work = {"POST": self.place}
        rest = dict.fromkeys(("GET", "PUT", "PATCH", "DELETE", "OPTIONS"), self.direct)
        return {
            **dict.fromkeys(("/v1/", "/v2/"), work | rest),
            **dict.fromkeys(WORK, work),
            "/v1/models": {"GET": self.direct},
            **{path: {"POST": self.direct} for path in LITTLE},
            **{path: {"POST": self.closed} for path in ONE_SERVER},
        }

    async def place(self, request: Request) -> Response:
        """Work: placed where its prompt is cached, or by load."""
        caller = self._tenants.caller(request.headers)
        if self.open >= self._max_open:
            raise unavailable("too many requests are in flight", 1, overloaded=True)
        fields = reading.fields_of(request.body)
        named = self._forwarder.named(reading.text(fields, "model"))
        model = named.model if named and named.model in self._models else UNKNOWN
        recording = self._recorder.started(request.request_id, request.path, caller.tenant, model)
        ending = _Ending(self, recording, self._recorder)
        try:
            ids, reason = await self._read(request, fields, named)
            forward = self._forward(request, caller, fields, named, ids)
            exchange = await self._forwarder.forward(forward)
            ending.exchange, ending.forward = exchange, forward
            if reason:
                self._recorder.unpredicted(reason)
            tokens = forward.tokens if ids else 0
            recording.routed(exchange.replica_id, tokens, exchange.predicted_tokens, None)
            return _answer(exchange, request, ending)
        except Unavailable as error:
            ending.at(429 if error.overloaded else 503)
            raise unavailable(str(error), error.retry_after_s, error.overloaded) from error
        except ApiError as error:
            ending.at(error.status)
            raise
        except BaseException as error:
            ending.at(500 if isinstance(error, Exception) else CLIENT_LEFT)
            raise

    async def direct(self, request: Request) -> Response:
        """No work for an engine: passed to whoever has least to do."""
        caller = self._tenants.caller(request.headers)
        forward = replace(self._forward(request, caller, None, None, None), tokens=0)
        try:
            exchange = await self._forwarder.direct(forward)
        except Unavailable as error:
            raise unavailable(str(error), error.retry_after_s, error.overloaded) from error
        return _answer(exchange, request, None)

    async def closed(self, request: Request) -> Response:
        """What changes a server is not passed on: it would reach one of many."""
        raise ApiError(403, f"{request.path} is for one server: ask it, not the router")

    async def _read(
        self, request: Request, fields: Fields | None, named: Named | None
    ) -> tuple[Reading | None, str]:
        """The prompts, or why they are not known."""
        model = self._models.get(named.model) if named else None
        if request.path not in (CHAT, COMPLETIONS):
            return None, reading.ENDPOINT
        if fields is None:
            return None, reading.JSON
        if model is None:
            return None, reading.MODEL
        try:
            if len(request.body) < OFF_LOOP_BYTES:
                return reading.read(request.path, fields, model), ""
            return await asyncio.to_thread(reading.read, request.path, fields, model), ""
        except Unread as unread:
            return None, unread.reason

    def _forward(
        self,
        request: Request,
        caller: Caller,
        fields: Fields | None,
        named: Named | None,
        ids: Reading | None,
    ) -> Forward:
        tokens = guessed_tokens(request.body)
        if ids:
            tokens = sum(map(len, ids.prompts)) // TOKEN_BYTES
        prompt = Prompt(
            model=named.model if named else "",
            token_ids=ids.prompts[0] if ids else b"",
            tenant=caller.tenant,
            request_id=request.request_id,
            salt=reading.text(fields, "cache_salt"),
            adapter=named.adapter if named else "",
            priority=reading.priority(fields),
            deadline_s=self._deadline_s,
            session=session_of(request.headers),
        )
        return Forward(
            method=request.method,
            target=_target(request),
            headers=self._headers(request),
            body=request.body,
            prompt=prompt,
            tokens=tokens,
            pool=named.pool if named else "",
            others=named.others if named else frozenset(),
            alone=ids is not None and ids.alone,
            stream=reading.streams(fields),
        )

    def _headers(self, request: Request) -> list[tuple[str, str]]:
        """Those of the client. Where there are tenants, its key is for this router only."""
        drop = {"authorization"} if self._tenants.known else set()
        headers = [pair for pair in request.headers.items() if pair[0].lower() not in drop]
        if request.headers.get("x-request-id") is None:
            headers.append(("x-request-id", request.request_id))
        return headers


class _Ending:
    """Counts a request as open until it ends, which it does once, however often it is told to."""

    def __init__(self, passing: Passing, recording: Recording, recorder: Recorder) -> None:
        self.recording = recording
        self.exchange: Exchange | None = None
        self.forward: Forward | None = None
        self._recorder = recorder
        self._passing: Passing | None = passing
        passing.open += 1

    def at(self, status: int) -> None:
        if self._passing is None:
            return
        self._passing.open -= 1
        self._passing = None
        if (exchange := self.exchange) is not None and (forward := self.forward) is not None:
            exchange.cancel()
            if forward.alone and exchange.prompt_tokens not in (None, forward.tokens):
                self._recorder.unpredicted(reading.TOKENS)
            self.recording.settled(
                exchange.replica_id,
                exchange.predicted_tokens,
                exchange.cached_tokens,
                exchange.generated,
            )
        self.recording.finished(status)


def _target(request: Request) -> str:
    """Its path, encoded anew, and its query as it came."""
    if ".." in request.path.split("/"):
        raise ApiError(404, "there is nothing above a path", code="not_found")
    path = quote(request.path, safe="/:@!$&'()*+,;=")
    return f"{path}?{request.query}" if request.query else path


def _answer(exchange: Exchange, request: Request, ending: _Ending | None) -> Response:
    headers = list(exchange.headers)
    kind = next((value for name, value in headers if name.lower() == "content-type"), "")
    stream = kind.startswith(STREAM)
    return Response(
        exchange.status,
        _body(exchange, request.request_id, ending, stream),
        {
            "x-hotbranch-replica": exchange.replica_id,
            "x-hotbranch-predicted-tokens": str(exchange.predicted_tokens),
        },
        kind,
        cut=failure(STOPPING) if stream else b"",
        more=[pair for pair in headers if pair[0].lower() not in OURS],
    )


async def _body(
    exchange: Exchange, request_id: str, ending: _Ending | None, stream: bool
) -> AsyncGenerator[bytes, None]:
    """The answer's bytes. A stream of events that breaks off ends with one that says so; of other
    bodies there is only less."""
    status = CLIENT_LEFT
    try:
        async with contextlib.aclosing(exchange.body()) as pieces:
            async for piece in pieces:
                if ending:
                    ending.recording.step(0)
                yield piece
        status = exchange.status
    except Unavailable as error:
        status = 503
        if stream:
            yield b"" if exchange.whole_event else b"\n\n"
            yield failure(unavailable(str(error), error.retry_after_s))
    except Exception as error:
        status = 500
        log_crash(error, request_id)
        if stream:
            yield failure(ApiError(500, "the router failed while streaming"))
    finally:
        if ending:
            ending.at(status)
