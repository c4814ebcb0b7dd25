"""What waits to be written to a stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any


class Outbox:
    """What waits to be written to one stream: at most `limit` items, or the stream is lost.

    An item is an iterable of messages, so that a long one is encoded only as it is written.
    """

    def __init__(self, limit: int) -> None:
        self.lost = False
        self.closed = False
        self._limit = limit
        self._items: asyncio.Queue[Iterable[Any] | None] = asyncio.Queue()

    def put(self, *messages: Any) -> None:
        self.put_lazily(messages)

    def put_lazily(self, messages: Iterable[Any]) -> None:
        if not self.lost:
            self.lost = self._items.qsize() >= self._limit
            self._items.put_nowait(messages)

    def end(self) -> None:
        """Let `run` return once all is written."""
        self._items.put_nowait(None)

    async def run(self, write: Callable[[Any], Awaitable[None]]) -> None:
        """Write until `end`, or until lost: gRPC takes no status before the last write is done."""
        try:
            while (messages := await self._items.get()) is not None:
                for message in messages:
                    if self.lost:
                        return
                    await write(message)
        finally:
            self.closed = True
