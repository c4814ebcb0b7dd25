"""A prompt's turn: what whoever sends it is told, and whom it tells what came of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.fleet.member import M
from router.generation import Prompt
from router.schedule.scheduler import Dispatch


class Going(Protocol):
    """What was sent. `begun` returns with its first token, or raises Lost or Rejected."""

    @property
    def cached_tokens(self) -> int | None: ...
    async def begun(self) -> None: ...
    def cancel(self) -> None: ...


R = TypeVar("R", bound=Going)


@dataclass(slots=True, eq=False)
class Turn(Generic[M]):
    """A prompt may go: where to, how many seconds are left to its deadline (0: any), and whom to
    tell that its prefill is over (with the tokens that were cached, where that is known) and that
    it has ended (with the tokens that were generated)."""

    link: M
    dispatch: Dispatch
    left_s: float
    on_began: Callable[[int | None], None]
    closed: Callable[[int], None]

    def began(self, cached: int | None) -> None:
        """Idempotent."""
        on_began, self.on_began = self.on_began, _nothing
        on_began(cached)


@dataclass(frozen=True, slots=True)
class Sent(Generic[M, R]):
    """A prompt that is on its way."""

    turn: Turn[M]
    route: R


@dataclass(slots=True, eq=False)
class Waiting(Generic[M, R]):
    """A prompt that waits for its turn."""

    prompt: Prompt
    send: Callable[[Turn[M]], R]
    sent: "asyncio.Future[Sent[M, R]]"


def _nothing(cached: int | None) -> None:
    pass
