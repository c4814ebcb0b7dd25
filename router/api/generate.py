"""From a valid request to its answer: placed, relayed in pieces or in one, ended in every case."""

import logging
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from hotbranch.keys import TOKEN_BYTES
from hotbranch.v1.serve_pb2 import Delta
from router.api.errors import STOPPING, ApiError, invalid, unavailable
from router.api.http import Response
from router.api.recorder import Recorder, Recording
from router.api.relay import Relay, Step
from router.api.schema import Options
from router.api.shape import FINISH, Choice, Shape, usage
from router.api.sse import Events, failure
from router.generation import Dispatcher, Prompt, Refused, Unavailable

CLIENT_LEFT = 499  # nginx's status for it; recorded, never sent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A valid generation request. `param` is the field its prompts came in."""

    endpoint: str
    param: str
    prompts: Sequence[Prompt]
    options: Options
    max_context: int
    shape: Shape
    created: int


class Generator:
    """Answers calls, at most `max_open` at a time."""

    def __init__(self, dispatcher: Dispatcher, recorder: Recorder, max_open: int) -> None:
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._max_open = max_open
        self.open = 0

    async def answer(self, call: Call) -> Response:
        """Raises ApiError. Cancelling it, or closing the body it returned, cancels the routes."""
        samplings = [
            call.options.samplings(
                len(prompt.token_ids) // TOKEN_BYTES, call.max_context, call.param
            )
            for prompt in call.prompts
        ]
        if self.open >= self._max_open:
            raise unavailable("too many requests are in flight", 1, overloaded=True)
        first = call.prompts[0]
        ending = _Ending(
            self,
            self._recorder.started(first.request_id, call.endpoint, first.tenant, first.model),
        )
        try:
            relay = await Relay.open(self._dispatcher, call.prompts, samplings)
            ending.relay = relay
            _record_routes(ending.recording, relay, call.prompts)
            if call.options.stream:
                return _streamed(call, relay, ending)
            body = orjson.dumps(await _collected(call, relay, ending.recording))
        except Unavailable as error:
            ending.at(429 if error.overloaded else 503)
            raise unavailable(str(error), error.retry_after_s, error.overloaded) from error
        except Refused as error:
            ending.at(400)
            raise invalid(str(error), error.field or call.param) from error
        except ApiError as error:
            ending.at(error.status)
            raise
        except Exception:
            ending.at(500)
            raise
        except BaseException:
            ending.at(CLIENT_LEFT)
            raise
        ending.at(200)
        return Response(200, body, _headers(relay))


class _Ending:
    """Counts a call as open until it ends, which it does once, however often it is told to."""

    def __init__(self, generator: Generator, recording: Recording) -> None:
        self.recording = recording
        self.relay: Relay | None = None
        self._generator: Generator | None = generator
        generator.open += 1

    def at(self, status: int) -> None:
        if self._generator is None:
            return
        self._generator.open -= 1
        self._generator = None
        if self.relay is not None:
            self.relay.cancel()
        self.recording.finished(status)


def _record_routes(recording: Recording, relay: Relay, prompts: Sequence[Prompt]) -> None:
    for route, prompt in zip(relay.routes, prompts, strict=True):
        recording.routed(
            route.replica_id,
            len(prompt.token_ids) // TOKEN_BYTES,
            route.predicted_tokens,
            route.cached_tokens,
        )


async def _collected(call: Call, relay: Relay, recording: Recording) -> dict[str, Any]:
    choices = [Choice() for _ in range(relay.choices)]
    async with aclosing(relay.steps()) as steps:
        async for step in steps:
            recording.step(_tokens(step))
            for index, delta in step:
                if error := _failed(delta):
                    raise error
                choices[index].add(delta)
    return {
        **_base(call, call.shape.object),
        "choices": [call.shape.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": usage(relay.prompt_tokens, relay.completion_tokens, relay.cached_tokens),
    }


def _streamed(call: Call, relay: Relay, ending: _Ending) -> Response:
    headers = {
        **_headers(relay),
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    return Response(
        200,
        _events(call, relay, ending),
        headers,
        "text/event-stream",
        cut=failure(STOPPING),
    )


async def _events(call: Call, relay: Relay, ending: _Ending) -> AsyncGenerator[bytes, None]:
    events = Events(_base(call, call.shape.chunk_object), call.options.include_usage)
    openings = (call.shape.opening(index) for index in range(relay.choices))
    pieces = [events.choice(opening) for opening in openings if opening]
    status = CLIENT_LEFT
    try:
        async with aclosing(relay.steps()) as steps:
            async for step in steps:
                ending.recording.step(_tokens(step))
                pieces += _pieces(step, call.shape, events)
                if pieces:
                    yield b"".join(pieces)
                    pieces = []
        end = usage(relay.prompt_tokens, relay.completion_tokens, relay.cached_tokens)
        status = 200
        yield events.end(end)
    except ApiError as error:
        status = error.status
        yield failure(error)
    except Exception as error:
        status = 500
        log_crash(error, call.prompts[0].request_id)
        yield failure(ApiError(500, "the router failed while streaming"))
    finally:
        ending.at(status)


def _pieces(step: Step, shape: Shape, events: Events) -> list[bytes]:
    """The chunks of one step; raises where a choice failed in it."""
    pieces = []
    for index, delta in step:
        if error := _failed(delta):
            raise error
        if piece := shape.piece(index, delta):
            pieces.append(events.choice(piece))
    return pieces


def _failed(delta: Delta) -> ApiError | None:
    """What to tell the client when the engine gave a choice up: it may simply ask again."""
    if not delta.finish or delta.finish in FINISH:
        return None
    return unavailable(delta.error or "the replica ended the request before it was done", 1)


def _tokens(step: Step) -> int:
    return sum(len(delta.token_ids) for _, delta in step) // TOKEN_BYTES


def _base(call: Call, kind: str) -> dict[str, Any]:
    return {
        "id": call.shape.id,
        "object": kind,
        "created": call.created,
        "model": call.prompts[0].adapter or call.prompts[0].model,
    }


def _headers(relay: Relay) -> dict[str, str]:
    """Where the request went and what was cached there, summed over its prompts."""
    replicas = dict.fromkeys(route.replica_id for route in relay.routes)
    predicted = sum(route.predicted_tokens for route in relay.routes)
    headers = {
        "x-hotbranch-replica": ", ".join(replicas),
        "x-hotbranch-predicted-tokens": str(predicted),
    }
    cached = [count for count in relay.cached_tokens if count is not None]
    if len(cached) == len(relay.routes):
        headers["x-hotbranch-cached-tokens"] = str(sum(cached))
    return headers


def log_crash(error: BaseException, request_id: str) -> None:
    """Where it happened, and the kind of error; its message may quote a prompt and is left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s in request %s\n%s", type(error).__name__, request_id, frames)
