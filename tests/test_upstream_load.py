"""Where requests go among plain servers: by prompts, by load, by what servers say of themselves."""

import asyncio
import json
from array import array
from pathlib import Path

from aiohttp import web
from api_site import until
from fake_openai import CHUNKS, FakeOpenAI, Handler, faking
from test_upstream_parts import VLLM
from upstream_site import front

from router.fleet.link import State
from router.prompt.models import load_model
from router.prompt.render import Chat


async def test_prompts_that_share_a_prefix_meet_whatever_else_comes(smollm2: Path) -> None:
    servers = [FakeOpenAI() for _ in range(3)]
    async with faking(*servers), front(smollm2, *servers, prediction_s=0.01) as here:
        homes: dict[int, set[str]] = {}
        for turn in range(4):
            for family in range(6):
                answer = await here.ask(f"You are number {family}. " * 40, f"Question {turn}?")
                homes.setdefault(family, set()).add(answer.headers["x-hotbranch-replica"])
        assert all(len(names) == 1 for names in homes.values()), homes
        assert len(set.union(*homes.values())) > 1, "not all on one"
        assert int(answer.headers["x-hotbranch-predicted-tokens"]) > 100
        assert [link["index_blocks"] > 0 for link in await here.replicas()].count(True) > 1


async def test_unrelated_requests_are_spread_by_what_is_under_way(smollm2: Path) -> None:
    """Of every endpoint, also of those whose prompts nobody knows."""
    servers = [FakeOpenAI() for _ in range(4)]
    async with faking(*servers), front(smollm2, *servers) as here:
        for server in servers:
            server.gate.clear()
        asks = [
            *(here.ask(f"{number} {'word ' * 50}", stream=False) for number in range(16)),
            *(
                here.http.post("/v1/embeddings", json={"model": "smol", "input": "x" * 200})
                for _ in range(16)
            ),
        ]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await until(lambda: sum(server.open for server in servers) == 32)
        assert all(5 <= server.open <= 11 for server in servers), [s.open for s in servers]
        assert here.in_flight == [server.open for server in servers]
        for server in servers:
            server.gate.set()
        assert {(await task).status_code for task in tasks} == {200}
        await until(lambda: here.in_flight == [0, 0, 0, 0])
        for replica in await here.replicas():
            assert replica["outstanding_tokens"] == 0
        assert here.router.dispatcher.open_routes == 0


async def test_every_kind_of_completion_prompt_is_read(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        text = "word " * 64
        for prompt in (text, [text, "more"], list(range(64)), [list(range(64))]):
            for _ in range(2):
                answer = await here.http.post(
                    "/v1/completions", json={"model": "smol", "prompt": prompt}
                )
            assert int(answer.headers["x-hotbranch-predicted-tokens"]) >= 48, prompt
        assert await here.metric("hotbranch_unpredicted_requests_total") == 0


async def test_long_prompts_whose_answers_come_whole_do_not_wait_for_each_other(
    smollm2: Path,
) -> None:
    """Nothing shows when such a prefill is over; those of streams do wait for their first byte."""
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        server.gate.clear()
        whole = [
            asyncio.create_task(here.ask(f"{n} {'word ' * 2000}", stream=False)) for n in range(6)
        ]
        await until(lambda: server.open == 6)
        streams = [asyncio.create_task(here.ask(f"{n} {'more ' * 2000}")) for n in range(6)]
        await asyncio.sleep(1.0)
        assert 7 <= server.open <= 8
        assert here.router.dispatcher.waiting >= 4
        server.gate.set()
        assert {(await task).status_code for task in [*whole, *streams]} == {200}


async def test_figures_of_vllm_are_its_load(smollm2: Path) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=VLLM)

    server = FakeOpenAI(endpoints={"/metrics": metrics})
    async with faking(server), front(smollm2, server) as here:
        (replica,) = await here.replicas()
        assert replica["running"] == 5
        assert replica["waiting"] == 4
        assert (replica["used_blocks"], replica["total_blocks"]) == (75, 200)
        description = here.router.fleet.links[0].description
        assert description is not None
        assert (description.block_size, description.capacity_blocks) == (32, 200)
        assert description.engine == "fake"


async def test_load_of_a_server_without_figures_is_what_we_have_there(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        server.gate.clear()
        task = asyncio.create_task(here.ask("hello " * 200))
        await until(lambda: here.router.fleet.links[0].load.waiting == 1)
        server.gate.set()
        await task
        await until(lambda: here.router.fleet.links[0].load.waiting == 0)


async def test_an_endpoint_that_tells_load_is_asked_where_there_are_no_figures(
    smollm2: Path,
) -> None:
    async def load(request: web.Request) -> web.Response:
        return web.json_response({"server_load": 9})

    server = FakeOpenAI(endpoints={"/load": load})
    async with faking(server), front(smollm2, server) as here:
        assert [replica["running"] for replica in await here.replicas()] == [9]


async def test_token_ids_are_compared_once(smollm2: Path) -> None:
    renderer = load_model("smol", smollm2, guards=False).renderer
    calls = 0

    def tokenizer(shift: int) -> Handler:
        async def tokenize(request: web.Request) -> web.Response:
            nonlocal calls
            calls += 1
            body = await request.json()
            if "prompt" in body:
                ids = array("I", renderer.text(body["prompt"])).tolist()
            else:
                ids = array("I", renderer.chat(Chat(body["messages"], body.get("tools")))).tolist()
                ids = [id + shift for id in ids]
            return web.json_response({"count": len(ids), "tokens": ids})

        return tokenize

    same = FakeOpenAI(endpoints={"/tokenize": tokenizer(0)})
    other = FakeOpenAI(endpoints={"/tokenize": tokenizer(1)})
    neither = FakeOpenAI()
    async with faking(same, other, neither), front(smollm2, same, other, neither) as here:
        problems = {replica["replica_id"]: replica["problem"] for replica in await here.replicas()}
        assert problems == {
            same.name: "",
            other.name: "it makes other token ids of chats, tools than this router",
            neither.name: "",
        }
        assert calls == 6


async def test_a_model_that_is_not_ours_goes_by_load_and_says_so(smollm2: Path) -> None:
    server = FakeOpenAI(model="theirs")
    async with faking(server), front(smollm2, server) as here:
        (replica,) = await here.replicas()
        assert replica["problem"].startswith("it serves 'theirs', which this router does not know")
        assert (await here.ask("hello", model="theirs")).status_code == 200
        assert (await here.ask("hello", model="smol")).status_code == 200
        assert await here.metric("hotbranch_unpredicted_requests_total", reason="model") == 2


async def test_adapters_have_names_of_their_own(smollm2: Path) -> None:
    base = {"id": "smol", "root": "/m"}
    both = [base, {"id": "sql", "root": "/l", "parent": "smol"}]
    plain, adapted = FakeOpenAI(cards=[base]), FakeOpenAI(cards=both)
    async with faking(plain, adapted), front(smollm2, plain, adapted) as here:
        texts = [f"{number} " + "word " * 100 for number in range(8)]
        for text in texts:
            answer = await here.ask(text, model="sql")
            assert answer.headers["x-hotbranch-replica"] == adapted.name
        predicted = [
            int((await here.ask(text, model=model)).headers["x-hotbranch-predicted-tokens"])
            for text in texts
            for model in ("smol", "sql")
        ]
        assert max(predicted[0::2]) < 48, "all that they share is how a chat begins"
        assert min(predicted[1::2]) > 90


async def test_a_salt_is_a_namespace(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        text = "word " * 100
        predicted = [
            int((await here.ask(text, **salt)).headers["x-hotbranch-predicted-tokens"]) > 0
            for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"})
        ]
        assert predicted == [False, False, False, True]


def ending(prompt: int, cached: int | None) -> list[bytes]:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": 5, "prompt_tokens_details": details}
    last = {"choices": [], "usage": usage}
    return [*CHUNKS[:-1], b"data: " + json.dumps(last).encode() + b"\n\n", CHUNKS[-1]]


async def test_what_the_answer_says_was_cached_settles_the_prediction(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        text = "word " * 100
        await here.ask(text)
        assert await here.metric("hotbranch_cached_tokens_total") == 0
        size = int(await here.metric("hotbranch_prompt_tokens_total"))
        server.chunks = ending(size, 32)
        predicted = int((await here.ask(text)).headers["x-hotbranch-predicted-tokens"])
        assert predicted > 90
        assert await here.metric("hotbranch_cached_tokens_total") == 32
        assert await here.metric("hotbranch_overpredicted_tokens_total") == predicted - 32
        assert await here.metric("hotbranch_generated_tokens_total") == len(CHUNKS) + 5
        server.chunks = ending(size, 0)  # a miss is not unknown
        await here.ask(text)
        assert await here.metric("hotbranch_overpredicted_tokens_total") == 2 * predicted - 32
        server.chunks = ending(size, None)
        await here.ask(text)
        assert await here.metric("hotbranch_overpredicted_tokens_total") == 2 * predicted - 32
        assert await here.metric("hotbranch_unpredicted_requests_total") == 0
        server.chunks = ending(size + 1, 0)  # the server has another prompt than we think
        await here.ask(text)
        assert await here.metric("hotbranch_unpredicted_requests_total", reason="tokens") == 1


async def test_what_a_miss_proves_gone_is_forgotten(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server, prediction_s=0.01) as here:
        trunk = "word " * 60
        await here.ask(trunk + "left " * 60)
        before = (await here.replicas())[0]["index_blocks"]
        size = int(await here.metric("hotbranch_prompt_tokens_total"))
        server.chunks = ending(size, 0)
        await here.ask(trunk + "right " * 60)  # as long, and nothing of it was there
        assert (await here.replicas())[0]["index_blocks"] <= before + 1
        answer = await here.ask(trunk + "left " * 60)
        assert int(answer.headers["x-hotbranch-predicted-tokens"]) < size - 40, "no more than trunk"


async def test_a_server_that_restarts_holds_nothing(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        await here.ask("word " * 100)
        assert (await here.replicas())[0]["index_blocks"] > 0
        await server.stop()
        await until(lambda: here.states == [State.CONNECTING])
        (replica,) = await here.replicas()
        assert replica["index_blocks"] == 0
        assert replica["problem"].startswith("it cannot be reached")
        refused = await here.ask("word " * 100)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert (await here.http.get("/ready")).status_code == 503
        await server.start()
        await until(lambda: here.states == [State.READY])
        answer = await here.ask("word " * 100)
        assert answer.headers["x-hotbranch-predicted-tokens"] == "0"


async def test_a_server_that_says_it_is_ill_gets_nothing_more(smollm2: Path) -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503 if ill.is_set() else 200)

    ill = asyncio.Event()
    server, other = FakeOpenAI(endpoints={"/health": health}), FakeOpenAI()
    async with faking(server, other), front(smollm2, server, other) as here:
        ill.set()
        await until(lambda: State.CONNECTING in here.states)
        for number in range(8):
            answer = await here.ask(f"{number} hello")
            assert answer.headers["x-hotbranch-replica"] == other.name
        ill.clear()
        await until(lambda: here.states == [State.READY] * 2)


async def test_a_server_that_starts_later_is_found(smollm2: Path, free_port: int) -> None:
    server = FakeOpenAI(port=free_port)
    async with front(smollm2, server, ready=0) as here:
        await until(lambda: "cannot be reached" in here.router.fleet.links[0].problem)
        async with faking(server):
            await until(lambda: here.states == [State.READY])
            assert (await here.ask("hello")).status_code == 200


async def test_ranks_are_holders_and_named_in_a_header(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server, options=",ranks=2") as here:
        ranks: dict[int, set[str]] = {}
        for _ in range(3):
            for family in range(8):
                await here.ask(f"Family {family}. " * 40)
                sent = {name.lower(): value for name, value in server.came[-1].headers}
                ranks.setdefault(family, set()).add(sent["x-data-parallel-rank"])
        assert all(len(seen) == 1 for seen in ranks.values()), ranks
        assert set.union(*ranks.values()) == {"0", "1"}
