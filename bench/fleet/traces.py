"""Recorded load as requests. This one: Mooncake's traces, of block hashes instead of texts."""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512  # tokens behind one of its hash ids


class TraceError(ValueError):
    """Not a trace; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when, in seconds from the start, what (uint32 token ids), and how many tokens it
    generates. Those of a `session` continue each other."""

    at: float
    prompt: bytes
    output: int
    tenant: str = ""
    session: str = ""

    @property
    def tokens(self) -> int:
        return len(self.prompt) // 4


def mooncake(path: Path) -> Iterator[Arrival]:
    """Lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (of 512 tokens each).

    A hash id becomes a block of tokens of its own. Prompts are made one by one: all of them would
    be gigabytes. Raises TraceError.
    """
    lines = [_checked(path, number, record) for number, record in records(path)]
    lines.sort(key=lambda line: line[0])
    for at, length, output, ids in lines:
        prompt = b"".join(array("I", [id + 1]).tobytes() * MOONCAKE_BLOCK for id in ids)
        yield Arrival(at, prompt[: 4 * length], output)


def _checked(path: Path, number: int, record: dict[str, Any]) -> tuple[float, int, int, list[int]]:
    """Time, length of the prompt and of the reply, and ids of one line."""
    try:
        at, ids = float(record["timestamp"]) / 1000, list(record["hash_ids"])
        length, output = int(record["input_length"]), max(1, int(record["output_length"]))
        array("I", [id + 1 for id in ids])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: not a Mooncake record: {error!r}") from None
    if not 0 < length <= MOONCAKE_BLOCK * len(ids):
        raise TraceError(f"{path}:{number}: {len(ids)} blocks are not {length} tokens")
    return at, length, output, ids


def faster(arrivals: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """The same load in less time."""
    return (replace(arrival, at=arrival.at / speed) for arrival in arrivals)


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, with the numbers of their lines. Raises TraceError."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise TraceError(f"{path}:{number}: not JSON") from None
                if not isinstance(record, dict):
                    raise TraceError(f"{path}:{number}: not an object")
                yield number, record
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not text") from None
