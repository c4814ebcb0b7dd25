"""What an answer says of the tokens that it took, read from its end as it passes."""

import json
import re
from collections import deque
from typing import Any

TAIL = 8192  # bytes: usage comes last, or nearly
# A quote inside a JSON string is escaped: this is a key wherever it stands.
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
_decoder = json.JSONDecoder()


class Tail:
    """The last pieces of a body, and how many server-sent events have passed."""

    def __init__(self) -> None:
        self.events = 0
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self.events += _ends(piece)
        if piece[:1] in (b"\r", b"\n") and self._pieces:
            seam = self._pieces[-1][-2:]
            self.events += _ends(seam + piece[:2]) - _ends(seam) - _ends(piece[:2])
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL:
            self._size -= len(self._pieces.popleft())

    @property
    def whole_event(self) -> bool:
        """Whether what has passed ends with an event."""
        return self._end(4).endswith((b"\n\n", b"\r\n\r\n"))

    def usage(self) -> dict[str, Any]:
        """The last usage object; empty where there is none."""
        end = self._end(TAIL)
        starts = [found.end() for found in _USAGE.finditer(end)]
        if not starts:
            return {}
        try:
            usage, _ = _decoder.raw_decode(end[starts[-1] :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return {}
        return usage if isinstance(usage, dict) else {}

    def _end(self, size: int) -> bytes:
        return b"".join(self._pieces)[-size:]


def _ends(piece: bytes) -> int:
    """Empty lines, each of which ends an event. A newline in JSON is escaped."""
    return piece.count(b"\n\n") + piece.count(b"\n\r\n")


def count(value: Any) -> int | None:
    """A number of tokens, where it is one: 0 and unknown differ."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def cached(usage: dict[str, Any]) -> int | None:
    """Prompt tokens that were cached."""
    details = usage.get("prompt_tokens_details")
    return count(details.get("cached_tokens")) if isinstance(details, dict) else None
