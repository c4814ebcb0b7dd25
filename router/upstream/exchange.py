"""One request at an upstream, and the answer, which passes as it comes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

import aiohttp

from router.fleet.member import Lost
from router.generation import Unavailable
from router.upstream.client import end_to_end
from router.upstream.usage import Tail, cached, count

TOO_MANY = 429
FAILED = 500  # and above


class Declined(Lost):
    """The server cannot answer now: perhaps another can. `exchange` has what it said."""

    def __init__(self, exchange: "Exchange") -> None:
        super().__init__(f"it answered {exchange.status}")
        self.exchange = exchange


class Keeper(Protocol):
    """Hears once of each: its prefill is over, it has ended."""

    def began(self, exchange: "Exchange", /) -> None: ...
    def ended(self, exchange: "Exchange", /) -> None: ...


class Exchange:
    """Implements `router.generation.Exchange`. `ask` sends the request and returns the answer's
    head. `stream`: the first byte of the answer ends the prefill, else the keeper knows better.

    Times are of a monotonic clock. `began_at` and `ended_at` are 0.0 before; `events` are the
    server-sent events that came, from the first to the last in `streamed_s` seconds.
    """

    def __init__(
        self,
        replica_id: str,
        predicted_tokens: int,
        uncached: int,
        stream: bool,
        ask: Callable[[], Awaitable[aiohttp.ClientResponse]],
        keeper: Keeper,
    ) -> None:
        self.replica_id = replica_id
        self.predicted_tokens = predicted_tokens
        self.uncached = uncached
        self.stream = stream
        self.cached_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.generated = 0
        self.status = 0
        self.headers: Sequence[tuple[str, str]] = ()
        self.sent_at = time.monotonic()
        self.began_at = 0.0
        self.streamed_s = 0.0
        self.events = 0
        self._ask = ask
        self._keeper = keeper
        self._tail = Tail()
        self._first = b""
        self._reason = ""  # why it was given up
        self._ended = False
        self._response: aiohttp.ClientResponse | None = None
        self._head = asyncio.create_task(self._begin(), name="exchange")

    @property
    def declined(self) -> bool:
        return self.status == TOO_MANY or self.status >= FAILED

    async def begun(self) -> None:
        """Return once the first byte of an answer is there, all of one in JSON. Raises Lost, or
        Declined."""
        await asyncio.wait([self._head])
        if self._head.cancelled() or self._reason:
            raise Lost(self._reason or "cancelled")
        self._head.result()
        if self.declined:
            raise Declined(self)

    async def body(self) -> AsyncGenerator[bytes, None]:
        assert self._response is not None, "it has begun"
        try:
            if self._first:
                self._tail.add(self._first)
                yield self._first
            if not self._ended:
                async for piece in self._response.content.iter_any():
                    self._tail.add(piece)
                    yield piece
                self._read_usage()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the upstream was lost: {self._reason or kind(error)}") from error
        finally:
            self.cancel()

    @property
    def whole_event(self) -> bool:
        """Whether the body passed so far ends with an event."""
        return self._tail.whole_event

    def prefilled(self) -> None:
        """The server computes no more of the prompt. Idempotent."""
        if not self.began_at and not self._ended:
            self.began_at = time.monotonic()
            self._keeper.began(self)

    def lose(self, reason: str) -> None:
        """The server is out of reach: who reads the answer is told."""
        self._reason = reason
        self.cancel()

    def cancel(self) -> None:
        """Close the connection, unless the answer has passed whole."""
        self._head.cancel()
        self._end()

    async def _begin(self) -> None:
        try:
            self._response = response = await self._ask()
            self.status = response.status
            self.headers = end_to_end(list(response.headers.items()))
            if self.declined:
                self._first = await response.read()
                self._end()
                return
            # A JSON answer is there as a whole or not at all: one that breaks off was not begun.
            whole = response.content_type == "application/json"
            self._first = await (response.read() if whole else response.content.readany())
        except (aiohttp.ClientError, OSError) as error:
            self._reason = self._reason or kind(error)
            self._end()
            return
        self.prefilled()

    def _end(self) -> None:
        if self._response is not None:
            self._response.close()
        if not self._ended:
            self._ended = True
            self._keeper.ended(self)

    def _read_usage(self) -> None:
        usage = self._tail.usage()
        self.events = self._tail.events
        self.streamed_s = time.monotonic() - self.began_at
        self.cached_tokens = cached(usage)
        self.prompt_tokens = count(usage.get("prompt_tokens"))
        self.generated = count(usage.get("completion_tokens")) or self.events


def kind(error: BaseException) -> str:
    """What failed, without what was sent."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or 'no connection'}"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return type(error).__name__
