"""Server-sent events made of prepared pieces: what is the same in every chunk is encoded once."""

from typing import Any

import orjson

from router.api.errors import ApiError

DONE = b"data: [DONE]\n\n"


class Events:
    """The chunks of one stream.

    `base` holds the fields all chunks share. When the client asked for usage, `usage: null` is on
    every chunk, and a last one without choices carries the usage.
    """

    def __init__(self, base: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(base)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def choice(self, encoded: bytes) -> bytes:
        """A chunk with one choice, given as JSON."""
        return self._head + encoded + self._tail

    def end(self, usage: dict[str, Any]) -> bytes:
        """What closes a stream that went well."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE


def failure(error: ApiError) -> bytes:
    """What closes a stream that did not."""
    return b"data: " + error.body() + b"\n\n"
