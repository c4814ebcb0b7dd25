"""What the API sees of a request that was placed: one route, its deltas, its end."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from hotbranch.v1.serve_pb2 import Delta, Sampling


class Ability(StrEnum):
    """What some replicas can, and others cannot."""

    STRUCTURES = "hold a reply to a structure"
    PARSES = "find tool calls in a reply"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt and the namespace it is cached under. `token_ids` is uint32 LE bytes.

    `needs` maps what its replica must be able to do to the field that asks for it; `wants` is what
    it should be able to do where one of the fleet can. `chat` is the contract's, for a replica that
    parses.
    """

    model: str
    token_ids: bytes
    tenant: str
    request_id: str
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    deadline_s: float = 0.0
    session: str = ""  # as the client names it
    chat: str = ""
    needs: Mapping[Ability, str] = field(default_factory=dict)
    wants: frozenset[Ability] = frozenset()


class Unavailable(Exception):
    """No replica can take the request now: HTTP 503, or 429 when `overloaded`."""

    def __init__(self, message: str, retry_after_s: int = 1, overloaded: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.overloaded = overloaded


class Refused(Exception):
    """This request can never run, says the engine, or no replica is one that could: HTTP 400.

    `field` names what asks for too much, where that is known.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Route(Protocol):
    """One prompt on one replica, generating one or more choices.

    A failure before the first token is retried on another replica inside; after it, the iterator
    yields a delta with FINISH_REASON_ERROR for each open choice. Leaving the iteration early, or
    `cancel`, cancels what still runs in the engine.
    """

    replica_id: str
    predicted_tokens: int  # tokens the chosen replica was thought to hold
    cached_tokens: int | None  # tokens it did hold, of choice 0; None until known

    def deltas(self) -> AsyncIterator[Sequence[tuple[int, Delta]]]:
        """(choice, delta) pairs, grouped by engine step, until every choice has finished."""

    def cancel(self) -> None: ...


class Dispatcher(Protocol):
    """Places prompts. Raises Unavailable or Refused."""

    async def open(self, prompt: Prompt, samplings: Sequence[Sampling]) -> Route:
        """Place one prompt for len(samplings) choices; returns once the first delta is there."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a model's name stands for at the upstreams that list it: our name of the base model, and
    the adapter upon it. `pool` is the model by which those servers are known, `others` are the
    addresses in it that do not list the name."""

    pool: str
    model: str
    adapter: str
    others: frozenset[str]


@dataclass(frozen=True, slots=True)
class Forward:
    """A request that is passed on as it is. `target` is its path and query.

    Where its prompt could not be told, `prompt.token_ids` are empty and `tokens` is a guess; where
    there are several, `prompt` is the first one and `tokens` are those of all. `alone`: there is
    one prompt with one choice, so that `cached_tokens` in the answer is about it. `stream`: its
    answer comes in pieces, so that the first one ends the prefill.
    """

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    prompt: Prompt
    tokens: int
    pool: str
    others: frozenset[str] = frozenset()
    alone: bool = False
    stream: bool = False


class Exchange(Protocol):
    """A request that was passed on, and the answer to it, byte for byte.

    `cached_tokens`, `prompt_tokens` and `generated` are what its usage says, as far as it does;
    known once the body has passed. Leaving the body early, or `cancel`, closes the connection.
    """

    replica_id: str
    predicted_tokens: int
    cached_tokens: int | None
    prompt_tokens: int | None
    generated: int
    status: int
    headers: Sequence[tuple[str, str]]

    @property
    def whole_event(self) -> bool:
        """Whether what has passed ends with a whole server-sent event."""

    def body(self) -> AsyncGenerator[bytes, None]:
        """Raises Unavailable where the answer breaks off."""

    def cancel(self) -> None: ...


class Forwarder(Protocol):
    """Passes requests on to upstreams."""

    def named(self, name: str) -> Named | None:
        """What some upstream that takes requests serves under a name."""

    async def forward(self, forward: Forward) -> Exchange:
        """Wait for its turn and pass it on; returns once there is an answer, also one that refuses
        where no upstream has another. Raises Unavailable."""

    async def direct(self, forward: Forward) -> Exchange:
        """The same at once, to the upstream that has least to do; it is not counted as work."""
