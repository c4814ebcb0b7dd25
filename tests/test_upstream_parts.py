"""What the upstream mode is made of, part by part."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api import reading
from router.generation import Forward, Prompt
from router.upstream.client import Client, end_to_end
from router.upstream.figures import Figures, from_load, from_metrics
from router.upstream.probe import cards, main_card, names
from router.upstream.speed import FEW, Speed
from router.upstream.usage import TAIL, Tail, cached, count

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 40.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="200",sliding_window="None"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""
SGLANG = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 7
sglang:num_queue_reqs{model_name="m"} 1
sglang:token_usage{model_name="m"} 0.28
sglang:max_total_num_tokens{model_name="m"} 4096
sglang:cache_config_info{page_size="64",num_pages="64"} 1
"""


def test_figures_of_vllm_are_summed_over_its_ranks() -> None:
    assert from_metrics(VLLM) == Figures(5, 4, 0.375, 32, 200, 0)


def test_figures_of_sglang() -> None:
    assert from_metrics(SGLANG) == Figures(7, 1, 0.28, 64, 64, 4096)


@pytest.mark.parametrize(
    "text", [b"", b"<html>", b"up 1\n", b"vllm:num_requests_running{", b"\xff"]
)
def test_what_is_not_about_load_has_no_figures(text: bytes) -> None:
    assert from_metrics(text) is None


def test_a_cache_that_is_not_known_yet_has_no_blocks() -> None:
    figures = from_metrics(VLLM.replace(b'"200"', b'"None"').replace(b" 4.0", b" NaN"))
    assert figures == Figures(5, 0, 0.375, 32, 0, 0)


def test_load_of_vllm() -> None:
    assert from_load(b'{"server_load": 3}') == Figures(running=3)
    for other in (b"", b"[]", b"{}", b'{"server_load": null}', b'{"detail":"Not Found"}'):
        assert from_load(other) is None


def test_speed_is_the_slope_of_first_bytes_over_tokens() -> None:
    speed, dice = Speed(), random.Random(1)
    for _ in range(200):
        tokens = dice.randrange(10, 4000)
        speed.began(tokens, 0.2 + tokens * 1e-3 + dice.uniform(-0.05, 0.05))
    assert speed.prefill_s_per_token == pytest.approx(1e-3, rel=0.1)


def test_speed_of_prompts_of_one_size_is_a_ratio() -> None:
    """From the first long one on; short ones say nothing of tokens until there are enough."""
    speed = Speed()
    speed.began(1000, 0.5)
    assert speed.prefill_s_per_token == pytest.approx(5e-4)
    short = Speed()
    for number in range(FEW):
        assert short.prefill_s_per_token == 0, number
        short.began(10, 0.5)
    assert short.prefill_s_per_token == pytest.approx(0.05)


def test_speed_follows_a_server_that_becomes_slower() -> None:
    speed, dice = Speed(), random.Random(2)
    for each in (1e-4, 5e-4):
        for _ in range(400):
            tokens = dice.randrange(10, 4000)
            speed.began(tokens, 0.01 + tokens * each)
    assert speed.prefill_s_per_token == pytest.approx(5e-4, rel=0.05)


def test_speed_is_never_negative_nor_made_of_nothing() -> None:
    speed = Speed()
    for tokens in range(100, 2000, 100):
        speed.began(tokens, 1 / tokens)  # longer prompts, sooner answers
    assert speed.prefill_s_per_token >= 0
    for _ in range(20):
        speed.began(0, 0.1)
    assert speed.prefill_s_per_token >= 0
    speed.streamed(2, 9.0)
    assert speed.step_s == 0, "too short to tell"
    speed.streamed(11, 1.0)
    assert speed.step_s == pytest.approx(0.1)


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


def test_usage_is_found_at_the_end_of_a_stream_however_it_is_cut() -> None:
    body = (
        b'data: {"choices":[{"delta":{"content":"\\"usage\\":{\\"prompt_tokens\\":5}"}}],'
        b'"usage":null}\n\ndata: {"choices":[],"usage": '
        + json.dumps(USAGE).encode()
        + b"}\n\ndata: [DONE]\n\n"
    )
    for width in range(1, len(body)):
        tail = Tail()
        for at in range(0, len(body), width):
            tail.add(body[at : at + width])
        assert tail.usage() == USAGE, width
        assert tail.events == 3, width
        assert cached(tail.usage()) == 0


def test_usage_behind_a_long_answer_is_found_and_one_before_it_is_not() -> None:
    tail = Tail()
    tail.add(b'{"choices":"' + b"x" * 100_000 + b'","usage":' + json.dumps(USAGE).encode() + b"}")
    assert tail.usage() == USAGE
    tail.add(b'"' + b"y" * TAIL)
    assert tail.usage() == {}


def test_unknown_counts_are_not_zero() -> None:
    assert cached({}) is None
    assert cached({"prompt_tokens_details": None}) is None
    assert cached({"prompt_tokens_details": {"cached_tokens": None}}) is None
    assert cached({"prompt_tokens_details": {"cached_tokens": 0}}) == 0
    assert [count(value) for value in (0, 3, True, -1, "3", None)] == [0, 3, None, None, None, None]


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_any_bytes_have_usage_or_none(pieces: list[bytes]) -> None:
    tail = Tail()
    for piece in [*pieces, b'"usage":{', *pieces]:
        tail.add(piece)
    assert isinstance(tail.usage(), dict)


def test_a_whole_event_ends_with_an_empty_line() -> None:
    tail = Tail()
    for piece, whole in [(b"data: {}\n\n", True), (b"data: {", False), (b"}\r\n\r", False)]:
        tail.add(piece)
        assert tail.whole_event is whole
    tail.add(b"\n")
    assert tail.whole_event


def listed(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


def test_names_are_aliases_adapters_and_other_models() -> None:
    found = cards(
        listed(
            {"id": "big", "root": "/models/big", "max_model_len": 4096, "owned_by": "vllm"},
            {"id": "big-too", "root": "/models/big", "parent": None},
            {"id": "sql", "root": "/loras/sql", "parent": "big"},
            {"id": "other", "root": "other"},
            {"id": 7},
        )
    )
    main = main_card(found, {})
    assert main is not None
    assert (main.id, main.context, main.owner) == ("big", 4096, "vllm")
    assert names(found, main) == {
        "big": ("big", ""),
        "big-too": ("big", ""),
        "sql": ("big", "sql"),
        "other": ("other", ""),
    }


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data":{}}', b'{"data":[3,{}]}', b"\xff"])
def test_what_lists_no_model_has_no_cards(body: bytes) -> None:
    assert cards(body) == []


def test_headers_of_a_connection_end_with_it() -> None:
    headers = [
        ("Connection", "close, X-Mine"),
        ("x-mine", "1"),
        ("Transfer-Encoding", "chunked"),
        ("x-two", "a"),
        ("x-two", "b"),
    ]
    assert end_to_end(headers) == [("x-two", "a"), ("x-two", "b")]


async def raw_server(
    answer: Callable[[int, asyncio.StreamWriter], Awaitable[None]],
) -> asyncio.Server:
    """Calls `answer` with the number of a request on its connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        while await reader.readuntil(b"\r\n\r\n"):
            await answer(number, writer)
            if writer.is_closing():
                return
            number += 1

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def test_a_request_on_a_connection_that_the_server_has_closed_goes_on_another() -> None:
    async def once(number: int, writer: asyncio.StreamWriter) -> None:
        if number:
            writer.transport.abort()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    server = await raw_server(once)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1, "")
    prompt = Prompt("m", b"", "t", "r")
    forward = Forward("POST", "/v1/chat/completions", [], b"", prompt, 1, "m")
    try:
        for _ in range(3):
            response = await client.send(forward, 0)
            assert await response.read() == b"ok"
    finally:
        await client.close()
        server.close()


def test_a_guess_is_bounded() -> None:
    assert [reading.guessed_tokens(b"x" * size) for size in (0, 40, 1 << 20)] == [1, 10, 8192]
