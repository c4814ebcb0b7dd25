"""A stream of cache events over real sockets: order, gaps, replays, restarts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from hotbranch.kv_events import subscribe
from hotbranch.kv_events.decode import Batch, Removed
from hotbranch.kv_events.subscribe import Subscription

PATIENCE_S = 20.0
MARK = 1 << 40  # the hash in frames that only show that a connection stands


def frame(mark: int) -> bytes:
    """A batch that removes a block of this name."""
    return msgspec.msgpack.encode(
        [0.0, [{"type": "BlockRemoved", "block_hashes": [mark], "medium": "GPU"}], 0]
    )


class Publisher:
    """vLLM's side: PUB and ROUTER. `kept` is what can be replayed, by number."""

    def __init__(self, place: Path, topic: bool = True) -> None:
        context = zmq.asyncio.Context.instance()
        self.endpoint, self.replay = f"ipc://{place}/events", f"ipc://{place}/replay"
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.next = 0
        self._topic = topic
        self._context = context
        self._open()

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay)
        self._task = asyncio.create_task(self._serve())

    async def publish(self, *marks: int, drop: bool = False, keep: bool = True) -> None:
        for mark in marks:
            await self.send(frame(mark), drop, keep)

    async def send(self, payload: bytes, drop: bool = False, keep: bool = True) -> None:
        """One frame, which may be lost on the way, and may be kept to be replayed."""
        if keep:
            self.kept[self.next] = payload
        if not drop:
            await self._pub.send_multipart([b"", self.next.to_bytes(8, "big"), payload])
        self.next += 1

    async def garble(self) -> None:
        await self._pub.send_multipart([b"", self.next.to_bytes(8, "big"), b"\xff\xfe"])
        self.next += 1

    async def reconnect(self) -> None:
        """Close all connections and listen again."""
        self.close()
        await asyncio.sleep(0.1)
        self._open()

    async def restart(self) -> None:
        """As another process."""
        self.next = 0
        self.kept.clear()
        await self.reconnect()

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            head = [client, empty, b""] if self._topic else [client, empty]
            for number, payload in sorted(self.kept.items()):
                if number >= self.asked[-1]:
                    await self._router.send_multipart([*head, number.to_bytes(8, "big"), payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([*head, end, b""])

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)


class Reader:
    """What a subscription hands on: marks, and the reasons of losses as text."""

    def __init__(self, publisher: Publisher, replay: bool = True) -> None:
        self.got: list[int | str] = []
        where = publisher.replay if replay else None
        self.subscription = Subscription(
            publisher.endpoint, where, "", self._received, self.got.append
        )
        self.task = asyncio.create_task(self.subscription.run())

    def _received(self, batch: Batch) -> None:
        for event in batch.events:
            assert isinstance(event, Removed)
            self.got += [name for name in event.hashes if isinstance(name, int)]

    async def until(self, got: Sequence[int | str]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.got != got:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            assert self.got == got

    async def connected(self, publisher: Publisher) -> None:
        """Publish until something arrives; forget it."""
        async with asyncio.timeout(PATIENCE_S):
            while MARK not in self.got:
                await publisher.publish(MARK, keep=True)
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        self.got.clear()


@pytest.fixture(params=[True, False], ids=["topic", "no topic"])
async def publisher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Publisher]:
    one = Publisher(tmp_path, request.param)
    yield one
    one.close()


async def test_what_was_before_us_is_replayed(publisher: Publisher) -> None:
    await publisher.publish(1, 2, 3)
    reader = Reader(publisher)
    await reader.until([1, 2, 3])
    assert publisher.asked == [0]
    await asyncio.sleep(0.2)
    await publisher.publish(4)
    await reader.until([1, 2, 3, 4])
    assert not reader.subscription.recoveries
    reader.task.cancel()


async def test_a_gap_is_filled_in_order(publisher: Publisher) -> None:
    reader = Reader(publisher)
    await reader.connected(publisher)
    await publisher.publish(1)
    await publisher.publish(2, 3, drop=True)
    await publisher.publish(4, 5)
    await reader.until([1, 2, 3, 4, 5])
    assert reader.subscription.recoveries == {"replayed": 1}
    reader.task.cancel()


async def test_a_gap_that_nobody_can_fill_is_told_before_what_follows(
    publisher: Publisher,
) -> None:
    reader = Reader(publisher)
    await reader.connected(publisher)
    await publisher.publish(1)
    await publisher.publish(2, drop=True, keep=False)
    await publisher.publish(3, drop=True)
    await publisher.publish(4)
    await reader.until([1, "gap", 3, 4])
    reader.task.cancel()


async def test_without_a_replay_a_gap_is_a_loss(publisher: Publisher) -> None:
    reader = Reader(publisher, replay=False)
    await reader.connected(publisher)
    await publisher.publish(1)
    await publisher.publish(2, drop=True)
    await publisher.publish(3)
    await reader.until([1, "gap", 3])
    assert not publisher.asked
    reader.task.cancel()


async def test_a_silent_replay_does_not_hold_the_stream(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribe, "REPLAY_S", 0.2)
    reader = Reader(publisher)
    await reader.connected(publisher)
    publisher._task.cancel()
    await publisher.publish(1, drop=True)
    await publisher.publish(2)
    await reader.until(["gap", 2])
    reader.task.cancel()


async def test_who_comes_too_late_is_told(publisher: Publisher) -> None:
    await publisher.publish(1, keep=False)
    await publisher.publish(2)
    reader = Reader(publisher)
    await reader.until(["late", 2])
    reader.task.cancel()


async def test_a_restart_is_told_and_read_from_its_beginning(publisher: Publisher) -> None:
    """Also where the new engine has published more than the old one, when we hear it first."""
    for ahead in (0, 20):
        reader = Reader(publisher)
        await reader.connected(publisher)
        await publisher.restart()
        await publisher.publish(*[1] * ahead, drop=True)
        assert (publisher.next >= reader.subscription._expected) == bool(ahead)
        async with asyncio.timeout(PATIENCE_S):
            while not reader.got:
                await publisher.publish(2)
                await asyncio.sleep(0.05)
        assert reader.got[: 1 + ahead] == ["restart", *[1] * ahead]
        assert set(reader.got[1 + ahead :]) == {2}
        reader.task.cancel()


async def test_a_broken_connection_to_the_same_engine_is_no_restart(publisher: Publisher) -> None:
    reader = Reader(publisher)
    await reader.connected(publisher)
    await publisher.reconnect()
    await publisher.publish(1, drop=True)
    async with asyncio.timeout(PATIENCE_S):
        while not reader.got:
            await publisher.publish(2)
            await asyncio.sleep(0.05)
    assert reader.got[:2] == [1, 2]
    assert set(reader.subscription.recoveries) == {"replayed"}
    reader.task.cancel()


async def test_what_cannot_be_read_is_a_loss(publisher: Publisher) -> None:
    reader = Reader(publisher)
    await reader.connected(publisher)
    await publisher.publish(1)
    await publisher.garble()
    await publisher.publish(2)
    await reader.until([1, "malformed", 2])
    reader.task.cancel()
