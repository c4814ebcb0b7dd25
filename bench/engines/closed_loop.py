"""A load played against an engine with a fixed number of requests outstanding.

Standard library only: every engine plays it in its own process, in its own environment. A session
is a conversation. The prompt of a turn is all that was said before, the engine's own replies
included, and what the turn adds; it is asked as soon as the turn before it was answered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """Token ids added to the conversation, and the tokens of the reply."""

    added: list[int]
    reply: int


Session = list[Turn]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: generate exactly `reply` tokens behind `prompt`."""

    id: int
    prompt: list[int]
    reply: int


@dataclass(slots=True)
class Tally:
    """What was served. Sizes in tokens."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0


class ClosedLoop:
    """`begin` gives the first requests; each answered one brings the next through `answered`.

    Ids count up from `first_id`.
    """

    def __init__(
        self, sessions: Iterable[Sequence[Sequence[object]]], outstanding: int, first_id: int = 0
    ) -> None:
        self.tally = Tally()
        self.next_id = first_id
        self._outstanding = outstanding
        self._sessions = iter([[Turn(*turn) for turn in session] for session in sessions])  # type: ignore[arg-type]
        self._open: dict[int, tuple[Ask, Session]] = {}  # with the turns that are left

    @property
    def done(self) -> bool:
        return not self._open

    def begin(self) -> list[Ask]:
        asks = (self._enter() for _ in range(self._outstanding))
        return [ask for ask in asks if ask is not None]

    def answered(self, id: int, reply: list[int], cached: int) -> Ask | None:
        """The request that takes the place of the one with this id, if any is left.

        ValueError when the reply has another length than was asked for.
        """
        ask, left = self._open.pop(id)
        if len(reply) != ask.reply:
            raise ValueError(f"{len(reply)} tokens instead of {ask.reply}")
        self.tally.requests += 1
        self.tally.prompt += len(ask.prompt)
        self.tally.cached += cached
        self.tally.generated += len(reply)
        return self._ask(ask.prompt + reply, left) if left else self._enter()

    def report(self, seconds: float) -> dict[str, float]:
        return asdict(self.tally) | {"seconds": seconds}

    def _enter(self) -> Ask | None:
        session = next(self._sessions, None)
        return self._ask([], session) if session else None

    def _ask(self, said: list[int], turns: Session) -> Ask:
        turn, *left = turns
        ask = Ask(self.next_id, said + turn.added, turn.reply)
        self.next_id += 1
        self._open[ask.id] = (ask, left)
        return ask
