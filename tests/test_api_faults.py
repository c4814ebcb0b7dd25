"""Bad input: which status, which field, and never a crash."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from api_site import BODY, HELLO, Fleet, Notes, Site, model, running, start, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from hotbranch.settings import RouterSettings
from router.api.app import App
from router.api.http import Request
from router.generation import Refused, Unavailable
from router.prompt.models import Catalog


@pytest_asyncio.fixture
async def site(smollm2: Path) -> AsyncIterator[Site]:
    async with running(smollm2) as site:
        yield site


# Bad input

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f"}}

CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 8192}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [49152]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"49152": 1}}, "logit_bias.49152"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"echo": True}, "echo"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    ({"include_reasoning": "yes"}, "include_reasoning"),
    ({"tools": [{"type": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL], "parallel_tool_calls": 3}, "parallel_tool_calls"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"function": {}}}, "tool_choice.function.name"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"user": 3}, "user"),
    ({"priority": "high"}, "priority"),
]


async def check_faults(
    site: Site, path: str, good: dict[str, Any], faults: list[tuple[dict[str, Any], str]]
) -> None:
    async with site.http() as http:
        for change, param in faults:
            answer = await http.post(path, json={**good, **change})
            assert answer.status_code == 400, (param, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not site.fleet.opened


async def test_bad_chat_input_names_its_field(site: Site) -> None:
    await check_faults(site, "/v1/chat/completions", BODY, CHAT_FAULTS)


COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [49152]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[1], [2, 10**18]]}, "prompt[1][1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [5] * 8192}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
]


async def test_bad_completion_input_names_its_field(site: Site) -> None:
    good = {"model": "smol", "prompt": "x"}
    await check_faults(site, "/v1/completions", good, COMPLETION_FAULTS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"model":"smol","temperature":NaN}',
        b'{"model":"smol","temperature":1e999}',
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"model":"\\ud800"}',
        b"\xff\xfe",
    ],
)
async def test_what_is_not_json_is_a_400(site: Site, body: bytes) -> None:
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def test_deep_json_in_tools_is_a_400(site: Site) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": [deep]}
    tool = {"type": "function", "function": {"name": "<|im_end|>", "parameters": deep}}
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", json={**BODY, "tools": [tool]})
    assert answer.status_code == 400
    assert "deep" in answer.json()["error"]["message"]


async def test_unknown_model_is_a_404(site: Site) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await site.openai().chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_a_413(site: Site, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(24):
            yield b"x" * (1 << 16)

    content: Any = pieces() if not declared else b"x" * (24 << 16)
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Unavailable("nobody", 7), 503, "7"),
        (Unavailable("full", 3, overloaded=True), 429, "3"),
        (Refused("never"), 400, None),
    ],
)
async def test_what_the_fleet_refuses(
    site: Site, error: Exception, status: int, retry: str | None
) -> None:
    site.fleet.error = error
    for stream in (False, True):
        async with site.http() as http:
            answer = await http.post("/v1/chat/completions", json={**BODY, "stream": stream})
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == retry
        assert answer.json()["error"]["message"].endswith(str(error))
    assert site.notes.statuses == [status, status]
    assert site.app.generator.open == 0


async def test_a_crash_is_a_500_that_quotes_no_prompt(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.fleet.error = RuntimeError("the prompt was: hello")
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 500
    assert "hello" not in answer.text
    assert "RuntimeError" in caplog.text
    assert "hello" not in caplog.text


async def test_too_many_open_requests_are_a_429(smollm2: Path) -> None:
    site = await start(smollm2, max_open=1)
    site.fleet.pause.clear()
    async with site.http() as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await until(lambda: bool(site.fleet.routes))
        second = await http.post("/v1/chat/completions", json=BODY)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        site.fleet.pause.set()
        assert (await first).status_code == 200
    await site.running.stop(0.0)


# Anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", 3])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "extra": JSON},
)
FIELDS = [
    "structured_outputs",
    "guided_json",
    "guided_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "include_reasoning",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "documents",
    "chat_template_kwargs",
    "response_format",
    "user",
    "priority",
    "cache_salt",
    "echo",
    "suffix",
    "best_of",
    "add_generation_prompt",
    "continue_final_message",
    "prompt",
]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_body_makes_the_server_fail(smollm2: Path, data: st.DataObject) -> None:
    """Drives the application itself, without sockets, so that thousands of bodies are cheap."""
    path = data.draw(
        st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
    )
    body = {
        "model": "smol",
        "max_tokens": data.draw(st.just(2) | JSON),
        "messages": data.draw(st.lists(MESSAGE, max_size=3) | JSON),
        **data.draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)),
        "tokens": data.draw(st.lists(st.integers(0, 49151), max_size=4) | JSON),
    }

    async def send() -> int:
        ready: Collection[str] = ()
        app = App(
            RouterSettings.model_validate({}),
            Catalog({"smol": model(smollm2)}, lambda: {"tuned": "smol"}),
            Fleet(280),
            Notes(),
            lambda: ready,
            CollectorRegistry(),
            {},
        )
        raw = json.dumps(body).encode()
        response = await app.respond(Request("POST", path, {}, "127.0.0.1", "r", raw))
        if not isinstance(response.body, bytes):
            pieces = [piece async for piece in response.body]
            assert pieces[-1].endswith(b"data: [DONE]\n\n")
        return response.status

    assert asyncio.run(send()) in (200, 400)
