"""A router in front of plain OpenAI-compatible servers: what passes, and what fails."""

import asyncio
import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from api_site import curl, until
from fake_openai import CHUNKS, FakeOpenAI, faking
from upstream_site import CHAT, HELLO, front, other_home

from hotbranch.cli import main
from hotbranch.load_settings import load_settings
from hotbranch.settings import RouterSettings
from router.fleet.link import State


async def test_bytes_pass_both_ways_as_they_are(smollm2: Path) -> None:
    server = FakeOpenAI(answer_headers=[("x-own", "1"), ("set-cookie", "a=1"), ("set-cookie", "b")])
    async with faking(server), front(smollm2, server) as here:
        big = "é" * 150_000
        body = (
            b'{ "zz": 123456789012345678901234567890, "model":"smol",\n "messages" :'
            b' [{"content":"\\u00e9\\ud83d\\ude42 ' + big.encode() + b'","role":"user"}], "a":1e3}'
        )
        headers = [("x-client", "7"), ("x-two", "a"), ("x-two", "b"), ("authorization", "Bearer k")]
        answer = await here.http.post(CHAT + "?x=%2F&y", content=body, headers=headers)
        assert answer.content == server.whole
        assert answer.headers["x-own"] == "1"
        assert answer.headers.get_list("set-cookie") == ["a=1", "b"]
        assert answer.headers["content-length"] == str(len(server.whole))
        came = server.came[-1]
        assert came.body == body
        assert came.path == CHAT + "?x=%2F&y"
        sent = {name.lower(): value for name, value in came.headers}
        assert sent["x-client"] == "7"
        assert [v for n, v in came.headers if n.lower() == "x-two"] == ["a", "b"]
        assert sent["user-agent"].startswith("python-httpx")
        assert sent["authorization"] == "Bearer k"
        assert sent["x-request-id"] == answer.headers["x-request-id"]
        assert int(sent["content-length"]) == len(body)

        streamed = await curl(here.url + CHAT, "-d", '{"model":"smol","stream":true,"messages":[]}')
        assert streamed == b"".join(CHUNKS)


async def test_a_stream_passes_as_it_comes(smollm2: Path) -> None:
    server = FakeOpenAI()
    server.pause.clear()
    async with faking(server), front(smollm2, server) as here:
        body = {"model": "smol", "stream": True, "messages": HELLO}
        async with here.http.stream("POST", CHAT, json=body) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == CHUNKS[0], "before the rest is there"
            server.pause.set()
            rest = [piece async for piece in pieces]
        assert b"".join(rest) == b"".join(CHUNKS[1:])
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_closes_the_connection_at_once(
    smollm2: Path, begun: bool
) -> None:
    server = FakeOpenAI()
    (server.pause if begun else server.gate).clear()
    async with faking(server), front(smollm2, server) as here:

        async def read() -> None:
            body = {"model": "smol", "stream": True, "messages": HELLO}
            async with here.http.stream("POST", CHAT, json=body) as answer:
                async for _ in answer.aiter_raw():
                    first.set()

        first = asyncio.Event()
        task = asyncio.create_task(read())
        await (first.wait() if begun else until(lambda: server.open == 1))
        assert (server.left, here.in_flight) == (0, [1])
        task.cancel()
        await until(lambda: server.left == 1 and server.open == 0)
        await until(lambda: here.in_flight == [0])
        assert here.router.fleet.links[0].outstanding.tokens == 0
        assert await here.metric("hotbranch_requests_total", status="499") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_goes_before_the_first_byte_costs_a_retry(
    smollm2: Path, stream: bool
) -> None:
    servers = [FakeOpenAI(), FakeOpenAI()]
    async with faking(*servers), front(smollm2, *servers) as here:
        text, home = await other_home(here, servers)
        home.gate.clear()
        task = asyncio.create_task(here.ask(text, stream=stream))
        await until(lambda: home.open == 1)
        await home.stop()
        answer = await task
        (stays,) = [server for server in servers if server is not home]
        assert answer.status_code == 200
        assert answer.content == (b"".join(CHUNKS) if stream else stays.whole)
        assert answer.headers["x-hotbranch-replica"] == stays.name
        assert await here.metric("hotbranch_retries_total") == 1
        await until(lambda: here.states.count(State.CONNECTING) == 1)
        assert (await here.ask(text)).headers["x-hotbranch-replica"] == stays.name


async def cut(request: web.Request, kind: str, length: int | None = None) -> web.StreamResponse:
    """An answer that breaks off."""
    response = web.StreamResponse(headers={"content-type": kind})
    response.content_length = length
    await response.prepare(request)
    await response.write(b"half")
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_a_stream_that_breaks_off_ends_with_an_error_event(smollm2: Path) -> None:
    server = FakeOpenAI(chunks=[CHUNKS[0], b'data: {"half', CHUNKS[1]], cut=2)
    async with faking(server), front(smollm2, server) as here:
        answer = await here.ask("hello")
        assert answer.status_code == 200
        events = answer.content.split(b"\n\n")
        assert events[0] + b"\n\n" == CHUNKS[0]
        assert events[1] == b'data: {"half'
        error = json.loads(events[2].removeprefix(b"data: "))["error"]
        assert error["code"] == "unavailable"
        assert events[3:] == [b""]
        assert await here.metric("hotbranch_requests_total", status="503") == 1
        assert here.in_flight == [0]


async def test_a_server_that_is_killed_while_it_streams_ends_with_an_error_event(
    smollm2: Path,
) -> None:
    server = FakeOpenAI()
    server.pause.clear()
    async with faking(server), front(smollm2, server) as here:
        task = asyncio.create_task(here.ask("hello"))
        await until(lambda: here.router.dispatcher.open_routes == 1 and server.open == 1)
        await asyncio.sleep(0.05)
        await server.stop()
        answer = await task
        assert answer.content.startswith(CHUNKS[0])
        last = answer.content.removeprefix(CHUNKS[0])
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "unavailable"


async def test_an_answer_in_json_that_breaks_off_is_asked_of_another(smollm2: Path) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        return await cut(request, "application/json")

    broken, well = FakeOpenAI(), FakeOpenAI()
    async with faking(broken, well), front(smollm2, broken, well) as here:
        text, home = await other_home(here, [broken, well])
        home.endpoints[CHAT] = half
        answer = await here.ask(text, stream=False)
        assert (answer.status_code, answer.content) == (200, well.whole)
        assert answer.headers["x-hotbranch-replica"] != home.name
        assert await here.metric("hotbranch_retries_total") == 1


@pytest.mark.parametrize("length", [None, 100])
async def test_another_answer_that_breaks_off_is_short(smollm2: Path, length: int | None) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        return await cut(request, "audio/wav", length)

    server = FakeOpenAI(endpoints={"/v1/audio/speech": half})
    async with faking(server), front(smollm2, server) as here:
        if length:
            with pytest.raises(httpx.RemoteProtocolError):
                await here.http.post("/v1/audio/speech", json={})
        else:
            assert (await here.http.post("/v1/audio/speech", json={})).content == b"half"
        await until(lambda: here.in_flight == [0])
        assert await here.metric("hotbranch_requests_total", status="503") == 1


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_who_cannot_answer_now_is_asked_only_first(smollm2: Path, status: int) -> None:
    servers = [FakeOpenAI(), FakeOpenAI()]
    async with faking(*servers), front(smollm2, *servers) as here:
        text, home = await other_home(here, servers)
        (other,) = [server for server in servers if server is not home]
        home.status = status
        answer = await here.ask(text)
        assert (answer.status_code, answer.headers["x-hotbranch-replica"]) == (200, other.name)
        other.status = status
        home.error, other.error = b'{"error": "home"}', b'{"error": "other"}'
        asked = [len(home.came), len(other.came)]
        answer = await here.ask(text)
        assert answer.status_code == status
        last = home if answer.content == home.error else other
        assert answer.content == last.error
        assert answer.headers["x-hotbranch-replica"] == last.name
        assert [len(home.came), len(other.came)] == [asked[0] + 1, asked[1] + 1]
        assert here.in_flight == [0, 0]


async def test_an_answer_that_refuses_passes_and_nobody_else_is_asked(smollm2: Path) -> None:
    servers = [FakeOpenAI(status=400), FakeOpenAI(status=400)]
    async with faking(*servers), front(smollm2, *servers) as here:
        answer = await here.ask("hello")
        assert (answer.status_code, answer.content) == (400, b'{"error":"as it is"}')
        assert sum(len(server.came) for server in servers) == 1
        assert await here.metric("hotbranch_requests_total", status="400") == 1


MESSAGE = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
UNREAD: list[tuple[str, str, Any]] = [
    ("endpoint", "/v1/embeddings", {"model": "smol", "input": "hello"}),
    ("endpoint", "/v1/responses", {"model": "smol", "input": "hello"}),
    ("endpoint", "/v1/what/ever", {}),
    ("json", CHAT, b"no json"),
    ("json", CHAT, b"[]"),
    ("json", CHAT, b'{"model":"smol","messages":[{"role":"user","content":"\\ud800"}]}'),
    ("model", CHAT, {"model": "other", "messages": [MESSAGE]}),
    ("model", CHAT, {"messages": [MESSAGE]}),
    ("model", CHAT, {"model": 7, "messages": [MESSAGE]}),
    ("field", CHAT, {"chat_template": "x", "messages": [MESSAGE]}),
    ("field", "/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 7}),
    ("media", CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("shape", CHAT, {"messages": "hello"}),
    ("shape", CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"messages": []}}),
    ("shape", CHAT, {"messages": [{"role": "robot", "content": "hello"}]}),
    ("shape", CHAT, {"messages": [MESSAGE], "tools": [{"type": "function"}]}),
    ("shape", CHAT, {"messages": [MESSAGE], "tools": {}}),
    ("shape", "/v1/completions", {"prompt": ""}),
    ("shape", "/v1/completions", {"prompt": [1 << 40]}),
    ("shape", "/v1/completions", {"prompt": [{"x": 1}]}),
]


async def test_what_cannot_be_read_passes_and_is_counted(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server) as here:
        counts: Counter[str] = Counter()
        for reason, path, body in UNREAD:
            if isinstance(body, dict):
                whole = body if reason == "model" else {"model": "smol", **body}
                body = json.dumps(whole).encode()
            answer = await here.http.post(path, content=body)
            assert (answer.status_code, answer.content) == (200, server.whole)
            assert server.came[-1].body == body
            counts[reason] += 1
            for counted, times in counts.items():
                name = "hotbranch_unpredicted_requests_total"
                assert await here.metric(name, reason=counted) == times, (reason, body)
        assert await here.metric("hotbranch_prompts_total") == len(UNREAD)


async def test_keys_of_servers_and_of_tenants(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "theirs")
    locked, open_one = FakeOpenAI(key="theirs"), FakeOpenAI()
    tenant = {"name": "one", "key_sha256": sha256(b"ours").hexdigest()}
    async with faking(locked, open_one):
        async with front(smollm2, locked, options=",api_key_env=THEIR_KEY") as here:
            assert (await here.ask("hello")).status_code == 200
            sent = [pair for pair in locked.came[-1].headers if pair[0].lower() == "authorization"]
            assert sent == [("authorization", "Bearer theirs")]
        async with front(smollm2, locked, ready=0) as here:
            await until(lambda: "answers 401" in here.router.fleet.links[0].problem)
        async with front(smollm2, open_one, tenants=[tenant]) as here:
            assert (await here.ask("hello")).status_code == 401
            here.http.headers["authorization"] = "Bearer ours"
            assert (await here.ask("hello")).status_code == 200
            names = [name.lower() for name, _ in open_one.came[-1].headers]
            assert "authorization" not in names, "it is a key of this router"
            assert await here.metric("hotbranch_requests_total", tenant="one") == 1


async def test_what_is_no_work_passes_and_what_changes_a_server_does_not(smollm2: Path) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        return web.Response(status=418, body=b"tea")

    server = FakeOpenAI(endpoints={"/tokenize": tokenize})
    async with faking(server), front(smollm2, server) as here:
        models = await here.http.get("/v1/models")
        assert models.json()["data"][0]["owned_by"] == "fake"
        assert (await here.http.post("/tokenize", content=b"x")).content == b"tea"
        assert (await here.http.delete("/v1/files/7")).status_code == 200
        assert (server.came[-1].method, server.came[-1].path) == ("DELETE", "/v1/files/7")
        got = await here.http.head("/v1/models")
        assert (got.status_code, got.content) == (200, b"")
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await here.http.post(path)).status_code == 403
        for path in ("/reset_prefix_cache", "/v1/../reset_prefix_cache", "/v1/%2e%2e/sleep"):
            reply = await curl(here.url + path, "--path-as-is", "-X", "POST")
            assert json.loads(reply)["error"]["code"] == "not_found", path
        await here.http.post("/v1/a%20b:c/d%3Fe?x=%20&y=")
        assert server.came[-1].path == "/v1/a%20b:c/d%3Fe?x=%20&y="
        assert await here.metric("hotbranch_prompts_total") == 1


async def test_an_answer_without_a_body_passes(smollm2: Path) -> None:
    async def nothing(request: web.Request) -> web.Response:
        return web.Response(status=204)

    server = FakeOpenAI(endpoints={"/v1/empty": nothing})
    async with faking(server), front(smollm2, server) as here:
        answer = await here.http.post("/v1/empty")
        assert (answer.status_code, answer.content) == (204, b"")


async def test_too_much_is_a_429_of_ours(smollm2: Path) -> None:
    server = FakeOpenAI()
    async with faking(server), front(smollm2, server, max_open=1) as here:
        server.gate.clear()
        task = asyncio.create_task(here.ask("hello"))
        await until(lambda: server.open == 1)
        answer = await here.ask("more")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        server.gate.set()
        assert (await task).status_code == 200
        assert (await here.ask("more")).status_code == 200


WRONG = [
    (["a:8000"], "--upstream[0].url a:8000: should be http://HOST:PORT"),
    (["http://a:1,speed=3"], "'speed=3' is no option of a server"),
    (["http://a:1,block_size=x"], "--upstream[0].block_size x: should be a valid integer"),
    (["http://a:1,kv_events=a:5557"], "should be tcp://HOST:PORT or ipc://PATH"),
    (["http://a:1,replay=tcp://a:5558"], "replay and topic go with kv_events"),
    (["http://a:1,kv_events=ipc:///x,ranks=2"], "the kv_events of several ranks need tcp://"),
    (["http://a:1", "http://a:1/v1"], "--upstream: two upstreams have the same URL"),
    (["http://a:1", "--replica", "b:1"], "a router has replicas or upstreams, not both"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_wrong_flags_are_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["router"]
    for value in flags:
        argv += [value] if value.startswith("--") or argv[-1] == "--replica" else []
        argv += ["--upstream", value] if value.startswith(("http", "a:")) else []
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_a_tenant_that_needs_a_salt_of_ours_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = {"name": "sealed", "key_sha256": "0" * 64, "isolation": "tenant"}
    monkeypatch.setenv("HOTBRANCH_TENANTS", json.dumps([tenant]))
    assert main(["router", "--upstream", "http://a:1"]) == 2
    assert "tenant sealed has isolation: tenant, which needs replicas" in capsys.readouterr().err


def test_a_list_in_the_environment_keeps_options_with_their_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"HOTBRANCH_UPSTREAM": "http://a:1,block_size=32,blocks=9,http://b:2/v1"}
    one, two = load_settings(RouterSettings, {}, environ).upstream
    assert (one.url, one.block_size, one.blocks) == ("http://a:1", 32, 9)
    assert two.url == "http://b:2"


def test_a_key_that_is_not_there_is_an_error(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", "--upstream", "http://a:1,api_key_env=NOT_THERE", "--port", "0"]) == 2
    assert "http://a:1: the variable NOT_THERE is not set" in capsys.readouterr().err
