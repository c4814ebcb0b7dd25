"""Logs of requests to an OpenAI-compatible endpoint as load: one JSON object a line."""

from collections.abc import Iterator
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from bench.fleet.traces import Arrival, TraceError, records
from router.prompt.errors import PromptError
from router.prompt.render import Chat, Renderer

OUTPUT = 128  # tokens of a reply that nothing is said about


def openai_log(path: Path, renderer: Renderer) -> Iterator[Arrival]:
    """Bodies of chat completions, in any order of time.

    `timestamp` or `created` is in seconds, or ISO 8601; `messages` and `tools` become the prompt
    that the model would have got; the reply has `usage.completion_tokens` tokens, else
    `max_completion_tokens` or `max_tokens`; `user` is the tenant. Raises TraceError.
    """
    lines = [
        (_at(record, where), number, record, where)
        for number, record in records(path)
        for where in [f"{path}:{number}"]
    ]
    lines.sort(key=lambda line: line[:2])
    for at, _, record, where in lines:
        prompt = _prompt(record, renderer, where)
        tenant = record.get("user") or ""
        yield Arrival(at - lines[0][0], prompt, _output(record, where), str(tenant))


def _at(record: dict[str, Any], where: str) -> float:
    given = record.get("timestamp", record.get("created"))
    try:
        if isinstance(given, str):
            return datetime.fromisoformat(given).timestamp()
        at = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        at = float("nan")
    if not isfinite(at):
        raise TraceError(f"{where}: neither timestamp nor created says when it came")
    return at


def _prompt(record: dict[str, Any], renderer: Renderer, where: str) -> bytes:
    messages, tools = record.get("messages"), record.get("tools")
    if not isinstance(messages, list) or not messages:
        raise TraceError(f"{where}: messages is not a list of messages")
    if not isinstance(tools, list | None):
        raise TraceError(f"{where}: tools is not a list")
    try:
        prompt = renderer.chat(Chat(messages, tools or None))
    except PromptError as error:
        raise TraceError(f"{where}: {error.param}: {error}") from None
    if not prompt:
        raise TraceError(f"{where}: the prompt is empty")
    return prompt


def _output(record: dict[str, Any], where: str) -> int:
    usage = record.get("usage")
    counts = [usage.get("completion_tokens") if isinstance(usage, dict) else None]
    counts += [record.get(name) for name in ("max_completion_tokens", "max_tokens")]
    count = next((count for count in counts if count is not None), OUTPUT)
    if not isinstance(count, int) or count < 0:
        raise TraceError(f"{where}: {count!r:.40} is not a number of tokens")
    return max(1, count)
