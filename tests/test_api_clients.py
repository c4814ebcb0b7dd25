"""Clients that leave, wait, lack a key, or meet a router that stops."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from api_site import (
    BODY,
    HELLO,
    SEALED_KEY,
    SHARED_KEY,
    TENANTS,
    Site,
    curl,
    running,
    start,
    until,
)

from router.api.http import serve


@pytest_asyncio.fixture
async def site(smollm2: Path) -> AsyncIterator[Site]:
    async with running(smollm2) as site:
        yield site


@pytest_asyncio.fixture
async def guarded(smollm2: Path) -> AsyncIterator[Site]:
    key = sha256(b"operator").hexdigest()
    async with running(smollm2, tenants=TENANTS, admin_key_sha256=key) as site:
        yield site


# Clients that leave


async def test_leaving_a_stream_cancels_its_route(site: Site) -> None:
    site.fleet.pause.clear()
    body = {**BODY, "stream": True}
    async with (
        site.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_bytes():
            break
    await until(lambda: site.notes.statuses == [499])
    assert site.fleet.routes[0].cancelled
    assert site.app.generator.open == 0


async def test_leaving_before_an_answer_in_one_piece_cancels_its_route(site: Site) -> None:
    site.fleet.pause.clear()
    async with site.http() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json=BODY, timeout=0.3)
    await until(lambda: site.notes.statuses == [499])
    assert site.fleet.routes[0].cancelled


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_cancels_the_placement(
    site: Site, stream: bool
) -> None:
    site.fleet.first_token.clear()
    async with site.http() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json={**BODY, "stream": stream}, timeout=0.3)
    await until(lambda: site.fleet.waiting_cancelled)
    await until(lambda: site.notes.statuses == [499])


async def test_leaving_cancels_every_prompt_of_a_batch(site: Site) -> None:
    site.fleet.pause.clear()
    body = {"model": "smol", "prompt": ["a", "b", "c"], "max_tokens": 9, "stream": True}
    async with site.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            break
    await until(lambda: len(site.fleet.routes) == 3 and all(r.cancelled for r in site.fleet.routes))


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.running.port)
    body = json.dumps({**BODY, "max_tokens": 4000, "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: bool(site.fleet.routes))
    async with site.http() as http:
        assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
    received = b""
    while piece := await reader.read(1 << 14):
        received += piece
        await asyncio.sleep(0)
    writer.close()
    assert b"[DONE]" in received
    assert received.count(b'"content":" one"') == 1000


# Tenants


async def test_only_known_keys_get_in(guarded: Site) -> None:
    for key in ("wrong", ""):
        async with guarded.http() as http:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models", headers=headers)).status_code == 401
            assert (await http.get("/health")).status_code == 200
    await guarded.openai(SHARED_KEY).chat.completions.create(
        model="smol", messages=HELLO, max_tokens=1
    )
    assert guarded.fleet.opened[0][0].tenant == "shared"
    assert guarded.notes.starts[0][2] == "shared"


async def test_isolation_and_cache_salt_make_namespaces(guarded: Site) -> None:
    salts = []
    for key in (SHARED_KEY, SEALED_KEY):
        for extra in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            await guarded.openai(key).chat.completions.create(
                model="smol", messages=HELLO, max_tokens=1, extra_body=extra
            )
            salts.append(guarded.fleet.opened[-1][0].salt)
    assert salts[0] == ""
    assert len(set(salts)) == 6
    assert all(len(salt) == 64 for salt in salts[1:])


async def test_administration_needs_its_key_or_this_host(guarded: Site, site: Site) -> None:
    async with guarded.http() as http:
        assert (await http.get("/admin/hello")).status_code == 401
        tenant = {"authorization": f"Bearer {SHARED_KEY}"}
        assert (await http.get("/admin/hello", headers=tenant)).status_code == 401
        operator = {"authorization": "Bearer operator"}
        assert (await http.get("/admin/hello", headers=operator)).status_code == 200
    async with site.http() as http:
        assert (await http.get("/admin/hello")).json() == {"hello": "operator"}


# Starting and stopping


async def test_a_port_in_use_is_named(site: Site) -> None:
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{site.running.port}: "):
        await serve(site.app, "127.0.0.1", site.running.port)


async def test_stopping_lets_open_requests_finish(smollm2: Path) -> None:
    site = await start(smollm2)
    site.fleet.pause.clear()
    async with site.http() as http:
        open_one = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await until(lambda: bool(site.fleet.routes))
        stopping = asyncio.create_task(site.running.stop(10.0))
        await asyncio.sleep(0.05)
        try:
            refused = (await http.get("/health")).status_code
        except httpx.ConnectError:
            refused = 503
        assert refused == 503
        assert not stopping.done()
        site.fleet.pause.set()
        assert (await open_one).json()["choices"][0]["message"]["content"] == " one two three"
    await stopping
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", site.running.port), timeout=1)


async def test_stopping_ends_what_takes_too_long_with_an_event(smollm2: Path) -> None:
    site = await start(smollm2)
    site.fleet.pause.clear()
    url = f"{site.url}/v1/chat/completions"
    stream = asyncio.create_task(curl(url, "-d", json.dumps({**BODY, "stream": True})))
    whole = asyncio.create_task(curl(url, "-d", json.dumps(BODY)))
    await until(lambda: len(site.fleet.routes) == 2)
    await asyncio.sleep(0.05)
    await site.running.stop(0.1)
    last = (await stream).rstrip(b"\n").split(b"\n\n")[-1]
    assert json.loads(last[6:])["error"]["message"] == "the router is stopping"
    assert json.loads(await whole)["error"]["type"] == "service_unavailable_error"
    assert all(route.cancelled for route in site.fleet.routes)


async def test_a_host_may_be_a_name(site: Site) -> None:
    named = await serve(site.app, "localhost", 0)
    try:
        assert (await curl(f"http://localhost:{named.port}/health")) == b'{"status":"ok"}'
    finally:
        await named.stop(0)
