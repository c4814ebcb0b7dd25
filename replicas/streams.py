"""What a replica keeps of the Serve streams of routers, and of the requests that came on them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from hotbranch.v1.serve_pb2 import ServerFrame
from replicas.outbox import Outbox

DELTAS = 1 << 16  # and rejections that wait for one router, at most


@dataclass(slots=True, eq=False)
class Stream:
    """A router's Serve stream. `tickets` maps its open requests to engine ids.

    What waits for the router is one frame: a reader that is slower than the engine gets the deltas
    of several steps at once, in order.
    """

    outbox: Outbox
    tickets: dict[int, int] = field(default_factory=dict)
    half_closed: bool = False
    waiting: ServerFrame | None = None

    def send(self, frame: ServerFrame) -> None:
        if self.waiting is None:
            self.waiting = frame
            self.outbox.put_lazily(self._take())
        else:
            self.waiting.MergeFrom(frame)
            if len(self.waiting.deltas) + len(self.waiting.rejections) > DELTAS:
                self.outbox.lost = True

    def _take(self) -> Iterator[ServerFrame]:
        """What waits, at the moment of writing."""
        frame, self.waiting = self.waiting, None
        if frame is not None:
            yield frame

    def end_if_done(self) -> None:
        if self.half_closed and not self.tickets:
            self.outbox.end()


@dataclass(slots=True, eq=False)
class Open:
    """A request in the engine. Without a stream, nobody waits for it any more."""

    stream: Stream | None
    ticket: int
    prompt_tokens: int
    last: float  # loop time of its last delta; before the first, of its receipt
    started: bool = False
    deadline: asyncio.TimerHandle | None = None

    def disarm(self) -> None:
        if self.deadline:
            self.deadline.cancel()
            self.deadline = None
