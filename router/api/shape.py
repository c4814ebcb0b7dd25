"""What an endpoint's answers look like: the part in which chat and completions differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotbranch.v1.serve_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Delta,
    TokenLogprobs,
    ToolCall,
)

FINISH = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Call:
    """A tool call of a reply, while its pieces come in."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, piece: ToolCall) -> None:
        self.id = self.id or piece.id
        self.name = self.name or piece.name
        self.arguments.append(piece.arguments)


@dataclass(slots=True)
class Choice:
    """A choice of an answer in one piece, while its deltas come in."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)  # by index

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            self.calls.setdefault(piece.index, Call()).add(piece)
        self.logprobs.extend(delta.logprobs)
        if delta.finish:
            self.finish_reason = FINISH[delta.finish]
            self.stop_reason = delta.stop_reason or None


class Shape(Protocol):
    """The JSON of one answer. A shape belongs to one request and may count along."""

    object: str
    chunk_object: str
    id: str

    def opening(self, index: int) -> bytes:
        """The JSON of a choice's first chunk; empty when nothing comes before its text."""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The JSON of a choice's next chunk, empty when the delta shows nothing yet."""

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished choice."""


def usage(
    prompt_tokens: int, completion_tokens: int, cached: Sequence[int | None]
) -> dict[str, Any]:
    """OpenAI's usage. `cached` has one entry for each prompt; one unknown makes the sum unknown,
    which is null and not 0."""
    known = [count for count in cached if count is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(known) if len(known) == len(cached) else None
        },
    }
