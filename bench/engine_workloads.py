"""The loads of `bench.engine`, as token ids: pure, and the same for the same arguments.

The shapes are those that prefix caching is usually shown with. Tenants are interleaved one by one,
which is the worst order for a cache that holds the prefix of one of them only.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Self

from bench.engines.closed_loop import Session, Turn

FIRST_TOKEN, LAST_TOKEN = 16, 49_000  # ordinary tokens of any vocabulary used here
ALIGN = 32  # the larger of the two block sizes: pools and shared parts are the same for both


class Load(NamedTuple):
    """What is played. `kv_tokens` is the pool, `outstanding` the requests in flight."""

    sessions: list[Session]
    kv_tokens: int
    outstanding: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests under prefixes: `groups` of `requests` each, that share `shared` tokens in parts.

    Sizes in tokens. `own` are the parts that belong to one request.
    """

    groups: int
    requests: int
    shared: tuple[int, ...]
    own: tuple[int, ...]
    reply: int

    @property
    def prefix(self) -> int:
        return sum(self.shared)

    @property
    def suffix(self) -> int:
        return sum(self.own)

    def scaled(self, divisor: int) -> Self:
        """The same shape of shorter texts; as many requests."""
        return replace(
            self,
            shared=tuple(size // divisor for size in self.shared),
            own=tuple(size // divisor for size in self.own),
            reply=self.reply // divisor,
        )

    def kv_tokens(self, running: int) -> int:
        """One hot set: a prefix, and what so many requests under it need of their own."""
        own = aligned(self.suffix + self.reply) + ALIGN  # the block that the prefix ends in, too
        return aligned(self.prefix) + running * own


RAG = Shape(groups=4, requests=24, shared=(1000, 500), own=(200, 50), reply=32)
VOICE = Shape(groups=16, requests=12, shared=(2000,), own=(60,), reply=16)
UNIQUE = Shape(groups=1, requests=32, shared=(), own=(500,), reply=16)


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations without a common system prompt, with the long tails of ShareGPT: log-normal
    lengths, a geometric number of turns. Lengths are medians in tokens."""

    sessions: int = 48
    outstanding: int = 16
    turns: float = 4.0  # mean
    most_turns: int = 8
    question: int = 60
    reply: int = 90
    spread: float = 0.8  # standard deviation of the logarithm
    longest: int = 400  # one text


CHAT = Chat()


def aligned(tokens: int) -> int:
    return -(-tokens // ALIGN) * ALIGN


def grouped(shape: Shape, running: int, seed: str) -> Load:
    """Every request is the shared parts of its group, then its own. All are there at once."""
    sessions = [[Turn(list(chain(*parts)), shape.reply)] for parts in _parts(shape, seed)]
    return Load(sessions, shape.kv_tokens(running), len(sessions))


def permuted(shape: Shape, running: int, seed: str) -> Load:
    """The same requests, each with its parts in an order of its own."""
    rng = random.Random(f"order {seed}")
    sessions = [
        [Turn(list(chain(*rng.sample(parts, len(parts)))), shape.reply)]
        for parts in _parts(shape, seed)
    ]
    return Load(sessions, shape.kv_tokens(running), len(sessions))


def chat(chat: Chat, kv_tokens: int, divisor: int, seed: str) -> Load:
    """Conversations of one turn to `most_turns`, their texts shorter by `divisor`."""
    rng = random.Random(f"chat {seed}")

    def length(median: int) -> int:
        drawn = rng.lognormvariate(0.0, chat.spread) * median
        return max(1, int(min(drawn, chat.longest)) // divisor)

    sessions = []
    for _ in range(chat.sessions):
        turns = 1
        while turns < chat.most_turns and rng.random() > 1 / chat.turns:
            turns += 1
        sessions.append(
            [Turn(_tokens(rng, length(chat.question)), length(chat.reply)) for _ in range(turns)]
        )
    return Load(sessions, kv_tokens, chat.outstanding)


def prompts(count: int, length: int, reply: int, seed: str) -> list[Session]:
    """Single prompts that share nothing."""
    rng = random.Random(f"prompts {seed}")
    return [[Turn(_tokens(rng, length), reply)] for _ in range(count)]


def context(sessions: Sequence[Session]) -> int:
    """Tokens of the longest conversation at its end."""
    return max(sum(len(turn.added) + turn.reply for turn in session) for session in sessions)


def _parts(shape: Shape, seed: str) -> list[list[list[int]]]:
    """The parts of every request, canonical order, group by group in turn."""
    rng = random.Random(f"groups {seed}")
    shared = [[_tokens(rng, size) for size in shape.shared] for _ in range(shape.groups)]
    return [
        [*shared[group], *(_tokens(rng, size) for size in shape.own)]
        for _ in range(shape.requests)
        for group in range(shape.groups)
    ]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
