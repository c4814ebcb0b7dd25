"""What an upstream's KV events tell the index: over real ZMQ sockets, beside real HTTP."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from api_site import until
from fake_openai import FakeOpenAI, Handler, faking
from test_kv_subscribe import Publisher
from upstream_site import CHAT, Front, front

from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.fleet.link import State
from router.prompt.models import load_model
from router.prompt.render import Chat

SIZE = 16
TEXT = "The harbour pilot keeps the night watch and counts the letters. " * 12


class Engine:
    """The cache of an engine as a test wills it, told by a publisher. Hashes are positions."""

    def __init__(self, publisher: Publisher, tokens: Sequence[int]) -> None:
        self.publisher = publisher
        self.tokens = tokens

    async def stores(self, start: int, stop: int, **more: Any) -> None:
        """These blocks of the tokens."""
        await self.tells(
            {
                "type": "BlockStored",
                "block_hashes": list(range(start + 1, stop + 1)),
                "parent_block_hash": start or None,
                "token_ids": list(self.tokens[start * SIZE : stop * SIZE]),
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                **more,
            }
        )

    async def removes(self, *blocks: int) -> None:
        names = [block + 1 for block in blocks]
        await self.tells({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})

    async def tells(self, *events: dict[str, Any], drop: bool = False, keep: bool = True) -> None:
        await self.publisher.send(msgspec.msgpack.encode([0.0, events, 0]), drop, keep)


class Scene:
    """A router over one server with events."""

    def __init__(self, here: Front, server: FakeOpenAI, engine: Engine) -> None:
        self.here = here
        self.server = server
        self.engine = engine
        self.holder = Holder(server.url)
        self.keys = block_keys(array("I", engine.tokens).tobytes(), SIZE, root("smol"))

    @property
    def held(self) -> set[int]:
        """Which blocks of the tokens the index says are there."""
        held = self.here.router.index.held(self.holder)
        return {number for number, key in enumerate(self.keys) if key in held}

    async def holds(self, *blocks: int) -> None:
        try:
            await until(lambda: self.held == set(blocks))
        except TimeoutError:
            assert self.held == set(blocks)

    async def predicted(self) -> int:
        answer = await self.here.ask(TEXT)
        return int(answer.headers["x-hotbranch-predicted-tokens"])


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    one = Publisher(tmp_path)
    yield one
    one.close()


@asynccontextmanager
async def scene(
    smollm2: Path,
    publisher: Publisher,
    replay: bool = True,
    server: FakeOpenAI | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    renderer = load_model("smol", smollm2, guards=False).renderer
    ids = renderer.chat(Chat([{"role": "user", "content": TEXT}]))
    engine = Engine(publisher, memoryview(ids).cast("I").tolist())
    options = f",kv_events={publisher.endpoint}" + f",replay={publisher.replay}" * replay
    server = server or FakeOpenAI()
    async with faking(server):
        options += f",block_size={SIZE},blocks=100"
        async with front(smollm2, server, options=options, **settings) as here:
            yield Scene(here, server, engine)


async def test_events_are_what_the_index_holds(smollm2: Path, publisher: Publisher) -> None:
    async with scene(smollm2, publisher, prediction_s=0.01) as one:
        await one.engine.stores(0, 3)
        await one.holds(0, 1, 2)
        assert await one.predicted() == 3 * SIZE
        await one.holds(0, 1, 2)  # what was sent is not what is there
        await one.engine.stores(3, 5)
        await one.holds(0, 1, 2, 3, 4)
        await one.engine.removes(4, 3)
        await one.holds(0, 1, 2)
        await one.engine.tells({"type": "AllBlocksCleared"})
        await one.holds()
        (replica,) = await one.here.replicas()
        assert replica["problem"] == ""


async def test_what_was_told_before_us_is_replayed(smollm2: Path, publisher: Publisher) -> None:
    tokens = list(range(1000))
    await Engine(publisher, tokens).stores(0, 2)
    async with scene(smollm2, publisher) as one:
        keys = block_keys(array("I", tokens).tobytes(), SIZE, root("smol"))[:2]
        await until(lambda: one.here.router.index.held(one.holder) == set(keys))


async def test_who_comes_too_late_goes_by_history_until_all_is_cleared(
    smollm2: Path, publisher: Publisher
) -> None:
    publisher.next = 7
    async with scene(smollm2, publisher, replay=False, prediction_s=0.01) as one:
        await one.predicted()
        history = one.held
        assert len(history) > 5
        events = one.here.router.fleet.links[0].watcher
        while not events.heard_at:
            await one.engine.stores(0, 1)
            await asyncio.sleep(0.05)
        assert events.recoveries["late"] == 1
        assert one.held <= history
        await one.predicted()
        await one.holds(*history)
        await one.engine.tells({"type": "AllBlocksCleared"})
        await one.holds()
        await one.engine.stores(0, 2)
        await one.holds(0, 1)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_gap_is_replayed_or_forgotten(
    smollm2: Path, publisher: Publisher, kept: bool
) -> None:
    async with scene(smollm2, publisher, prediction_s=0.01) as one:
        await one.engine.stores(0, 2)
        await one.holds(0, 1)
        event = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}
        await one.engine.tells(event, drop=True, keep=kept)
        await one.engine.stores(0, 1)  # a copy
        if kept:
            await one.holds(0)
        else:
            await one.holds()
            assert await one.here.metric("hotbranch_index_recoveries_total", kind="gap") == 1
            await one.predicted()
            assert len(one.held) > 5, "history again"


async def test_an_engine_that_begins_anew_holds_nothing(
    smollm2: Path, publisher: Publisher
) -> None:
    async with scene(smollm2, publisher) as one:
        await one.engine.stores(0, 3)
        await one.holds(0, 1, 2)
        await publisher.restart()
        await asyncio.sleep(0.3)  # until we are connected again
        await one.engine.stores(0, 1)
        await one.holds(0)
        assert await one.here.metric("hotbranch_index_recoveries_total", kind="epoch") == 1


def started(at: list[float]) -> Handler:
    async def metrics(request: web.Request) -> web.Response:
        text = f"vllm:num_requests_running 0\nprocess_start_time_seconds {at[0]}\n"
        return web.Response(text=text)

    return metrics


@pytest.mark.parametrize("same", [True, False])
async def test_what_events_told_survives_a_broken_connection_only_of_one_process(
    smollm2: Path, publisher: Publisher, same: bool
) -> None:
    """An engine that was started anew has told nothing yet when the server is back."""
    at = [1000.0]
    server = FakeOpenAI(endpoints={"/metrics": started(at)})
    async with scene(smollm2, publisher, server=server) as one:
        await one.engine.stores(0, 3)
        await one.holds(0, 1, 2)
        await server.stop()
        await until(lambda: one.here.states == [State.CONNECTING])
        await one.holds()
        await one.engine.removes(2)
        at[0] += 0 if same else 1
        await server.start()
        await until(lambda: one.here.states == [State.READY])
        if same:
            await one.holds(0, 1)
        else:
            await asyncio.sleep(0.1)
            assert one.held == set()
        assert await one.here.metric("hotbranch_index_recoveries_total", kind="reconnect") == 1


async def test_blocks_of_another_size_are_a_problem(smollm2: Path, publisher: Publisher) -> None:
    async with scene(smollm2, publisher) as one:
        await one.engine.stores(0, 1, token_ids=list(range(32)), block_size=32)
        await until(lambda: "give block_size" in one.here.router.fleet.links[0].problem)


async def test_events_in_other_namespaces(smollm2: Path, publisher: Publisher) -> None:
    cards = [{"id": "smol", "root": "/m"}, {"id": "sql", "root": "/l", "parent": "smol"}]
    server = FakeOpenAI(cards=cards)
    async with scene(smollm2, publisher, server=server, prediction_s=0.01) as one:
        await one.engine.stores(0, 4, lora_id=1, lora_name="sql", extra_keys=[["sql"]] * 4)
        await until(lambda: len(one.here.router.index.held(one.holder)) == 4)
        ask = {"messages": [{"role": "user", "content": TEXT}], "stream": True}
        found = []
        for more in ({"model": "smol"}, {"model": "sql"}, {"model": "sql", "cache_salt": "s"}):
            answer = await one.here.http.post(CHAT, json=ask | more)
            found.append(int(answer.headers["x-hotbranch-predicted-tokens"]))
        assert found == [0, 4 * SIZE, 0]
        await one.engine.tells({"type": "AllBlocksCleared"})
        await one.engine.stores(0, 4, extra_keys=[["s"], None, None, None])
        await until(lambda: len(one.here.router.index.held(one.holder)) == 4)
        answer = await one.here.http.post(CHAT, json=ask | {"model": "smol", "cache_salt": "s"})
        assert answer.headers["x-hotbranch-predicted-tokens"] == str(4 * SIZE)


async def test_blocks_that_are_not_on_the_gpu_can_be_loaded(
    smollm2: Path, publisher: Publisher
) -> None:
    async with scene(smollm2, publisher) as one:
        await one.engine.stores(0, 3)
        await one.engine.stores(0, 2, medium="CPU")
        await one.engine.removes(2, 1)
        await one.holds(0)
        assert await one.predicted() == 2 * SIZE
