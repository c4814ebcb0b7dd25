"""One publisher's stream of cache events, in order: gaps replayed, what cannot be is said.

The protocol is vLLM's, which SGLang speaks, too: a PUB socket sends (topic, number, payload); a
ROUTER answers (empty, number) with what it still has from there on, each as (empty, topic, number,
payload), older releases without the topic, and ends with the number -1. Numbers begin at 0 with
the process: one that comes again means that the engine was started anew. Where the connection broke
and numbers go on, a replay of the last frame that we had tells whether it is the same engine's.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import zmq
import zmq.asyncio

from hotbranch.kv_events.decode import Batch, Malformed, decode

MOST_WAITING = 100_000  # frames in our socket, as many as vLLM keeps in its own
REPLAY_S = 5.0  # for each frame of a replay
END = -1

REASONS = (
    "late",  # what was published before we came could not be had
    "gap",  # frames were lost on the way, and could not be had again
    "restart",  # the engine began anew
    "malformed",  # a frame could not be read
)


class Subscription:
    """Hands on what one publisher sends. `received` gets every batch, in order, once.

    `lost` is told a reason of REASONS when what came before says nothing about the engine's cache
    any more; what comes after is to be read as from there on. `recoveries` counts reasons, and as
    `replayed` the gaps that were filled.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        topic: str,
        received: Callable[[Batch], None],
        lost: Callable[[str], None],
    ) -> None:
        self.recoveries: Counter[str] = Counter()
        self._endpoint = endpoint
        self._replay = replay
        self._topic = topic
        self._received = received
        self._lost = lost
        self._expected = 0
        self._heard = -1  # the last number on the stream itself, replays apart
        self._last = b""  # payload of the frame before the expected one

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, MOST_WAITING)
            socket.subscribe(self._topic.encode())
            breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(self._endpoint)
            await self._fill("late")
            while True:
                frames = await socket.recv_multipart()
                if await _broken(breaks) and not await self._same():
                    self._restart()
                if len(frames) < 2:
                    self._tell("malformed")
                    continue
                await self._take(_number(frames[-2]), frames[-1])

    async def _take(self, number: int, payload: bytes) -> None:
        """A frame of the stream."""
        if number <= self._heard:
            self._restart()
        self._heard = number
        if number > self._expected:
            await self._fill("gap" if self._expected else "late", number)
        if number >= self._expected:  # else a replay had it
            self._apply(number, payload)

    def _restart(self) -> None:
        self._tell("restart")
        self._expected, self._heard, self._last = 0, -1, b""

    async def _same(self) -> bool:
        """Whether the publisher still has the last frame that we had, as we had it."""
        if not self._expected:
            return True
        frames = await self._replayed(self._expected - 1)
        return (self._expected - 1, self._last) in frames[:1]

    async def _fill(self, reason: str, until: int = 0) -> None:
        """Have what is missing replayed, up to the frame before `until` at least."""
        began = self._expected
        for number, payload in await self._replayed(began):
            if number < self._expected:
                continue
            if number > self._expected:
                self._tell(reason)
            self._apply(number, payload)
        if self._expected < until:
            self._tell(reason)
            self._expected, self._last = until, b""
        elif until and self._expected > began:
            self.recoveries["replayed"] += 1

    async def _replayed(self, start: int) -> list[tuple[int, bytes]]:
        """What the publisher still has from a number on; nothing when it does not answer."""
        if self._replay is None:
            return []
        frames: list[tuple[int, bytes]] = []
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(self._replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                try:
                    async with asyncio.timeout(REPLAY_S):
                        reply = await socket.recv_multipart()
                except TimeoutError:
                    return frames
                number = _number(reply[-2])
                if number == END:
                    return frames
                frames.append((number, reply[-1]))

    def _apply(self, number: int, payload: bytes) -> None:
        self._expected, self._last = number + 1, payload
        try:
            batch = decode(payload)
        except Malformed:
            self._tell("malformed")
            return
        self._received(batch)

    def _tell(self, reason: str) -> None:
        self.recoveries[reason] += 1
        self._lost(reason)


async def _broken(breaks: zmq.asyncio.Socket) -> bool:
    """Whether the connection broke since this was asked."""
    broken = False
    while await breaks.poll(0):
        await breaks.recv_multipart()
        broken = True
    return broken


def _number(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)
