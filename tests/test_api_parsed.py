"""Tool calls and reasoning that a replica finds, over real gRPC, read by the real openai client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio
from api_site import HELLO
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from told_site import ABLE, END, PLAIN, ToldSite, call, said, told_site

from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, Delta

TOOL: Any = {
    "type": "function",
    "function": {"name": "level", "description": "of a lock", "parameters": {"type": "object"}},
}
NAMED: Any = {"type": "function", "function": {"name": "level"}}
TWO_CALLS = [
    said("Let me see. "),
    call(0, "", name="level"),
    call(0, '{"lock"'),
    call(0, ": 3}"),
    call(1, '{"lock": 4}', name="level"),
    END,
]


@pytest_asyncio.fixture
async def site(smollm2: Path) -> AsyncIterator[ToldSite]:
    async with told_site(smollm2, ABLE) as site:
        yield site


async def ask(site: ToldSite, **fields: Any) -> Any:
    fields = {"model": "smol", "messages": HELLO, **fields}
    return await site.client.chat.completions.create(**fields)


async def streamed(site: ToldSite, **fields: Any) -> tuple[list[Any], dict[int, dict[str, Any]]]:
    """All chunks, and what they add up to for each choice."""
    chunks = [chunk async for chunk in await ask(site, stream=True, **fields)]
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        sums = whole.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}})
        sums["content"] += choice.delta.content or ""
        sums["reasoning"] += getattr(choice.delta, "reasoning", "")
        sums["finish"] = choice.finish_reason
        for piece in choice.delta.tool_calls or []:
            id, name, arguments = sums["calls"].get(piece.index, ("", "", ""))
            id, name = id + (piece.id or ""), name + (piece.function.name or "")
            sums["calls"][piece.index] = id, name, arguments + piece.function.arguments
    return chunks, whole


# Tool calls


async def test_calls_come_whole(site: ToldSite) -> None:
    site.says(*TWO_CALLS)
    answer = await ask(site, tools=[TOOL], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see. "
        calls = choice.message.tool_calls
        assert all(isinstance(one, ChatCompletionMessageFunctionToolCall) for one in calls)
        assert [(one.id, one.type, one.function.name) for one in calls] == [
            ("call-0", "function", "level"),
            ("call-1", "function", "level"),
        ]
        assert [one.function.arguments for one in calls] == ['{"lock": 3}', '{"lock": 4}']
    assert answer.usage.completion_tokens == 2 * 5


async def test_calls_come_in_pieces(site: ToldSite) -> None:
    site.says(*TWO_CALLS)
    chunks, whole = await streamed(site, tools=[TOOL], n=2)
    expected = {
        "content": "Let me see. ",
        "reasoning": "",
        "finish": "tool_calls",
        "calls": {
            0: ("call-0", "level", '{"lock": 3}'),
            1: ("call-1", "level", '{"lock": 4}'),
        },
    }
    assert whole == {0: expected, 1: expected}
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].index == 0]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [piece.to_dict() for piece in pieces[:2]] == [
        {
            "index": 0,
            "id": "call-0",
            "type": "function",
            "function": {"name": "level", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"lock"'}},
    ]


@pytest.mark.parametrize(
    ("fields", "reason", "finish"),
    [
        ({}, END, "tool_calls"),
        ({"tool_choice": "required"}, END, "tool_calls"),
        ({"tool_choice": NAMED}, END, "stop"),
        ({}, Delta(finish=FINISH_REASON_LENGTH), "length"),
    ],
)
async def test_how_a_reply_with_calls_ends(
    site: ToldSite, fields: dict[str, Any], reason: Delta, finish: str
) -> None:
    site.says(call(0, "{}", name="level"), reason)
    answer = await ask(site, tools=[TOOL], **fields)
    _, whole = await streamed(site, tools=[TOOL], **fields)
    assert answer.choices[0].finish_reason == whole[0]["finish"] == finish
    assert answer.choices[0].message.content is None
    assert len(answer.choices[0].message.tool_calls) == len(whole[0]["calls"]) == 1


async def test_calls_that_were_not_wanted_in_parallel_are_left_out(site: ToldSite) -> None:
    site.says(*TWO_CALLS)
    fields = {"tools": [TOOL], "parallel_tool_calls": False}
    answer = await ask(site, **fields)
    chunks, whole = await streamed(site, **fields)
    assert [one.id for one in answer.choices[0].message.tool_calls] == ["call-0"]
    assert whole[0]["calls"] == {0: ("call-0", "level", '{"lock": 3}')}
    assert all(c.choices[0].delta.to_dict() for c in chunks[:-1]), "none that shows nothing"


async def test_a_reply_without_calls_has_none(site: ToldSite) -> None:
    site.says(said("No."), END)
    message = (await ask(site, tools=[TOOL])).choices[0].message
    assert message.to_dict() == {
        "role": "assistant",
        "content": "No.",
        "refusal": None,
        "reasoning": None,
    }


# Reasoning


async def test_reasoning_comes_beside_the_content(site: ToldSite) -> None:
    site.says(said(reasoning="It is "), said("Four", reasoning="even."), said("."), END)
    message = (await ask(site)).choices[0].message
    assert (message.content, message.reasoning) == ("Four.", "It is even.")
    chunks, whole = await streamed(site)
    assert (whole[0]["content"], whole[0]["reasoning"]) == ("Four.", "It is even.")
    assert chunks[1].choices[0].delta.to_dict() == {"reasoning": "It is "}
    assert chunks[2].choices[0].delta.to_dict() == {"reasoning": "even.", "content": "Four"}


async def test_a_reply_that_is_all_reasoning_has_no_content(site: ToldSite) -> None:
    site.says(said(reasoning="It is"), Delta(finish=FINISH_REASON_LENGTH))
    choice = (await ask(site)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")


async def test_logprobs_that_would_tell_the_reasoning_are_null(site: ToldSite) -> None:
    site.says(said(), said("Four"), END)
    fields = {"logprobs": True, "extra_body": {"include_reasoning": False}}
    assert (await ask(site, **fields)).choices[0].logprobs is None
    chunks, _ = await streamed(site, **fields)
    assert [chunk.choices[0].logprobs for chunk in chunks] == [None] * 3


# What a parser is told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {}),
        ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}),
        (
            {
                "tools": [{**TOOL, "cache_control": {}}],
                "tool_choice": NAMED,
                "parallel_tool_calls": False,
            },
            {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False},
        ),
        (
            {
                "reasoning_effort": "none",
                "extra_body": {
                    "include_reasoning": False,
                    "chat_template_kwargs": {"thinking": False, "reasoning_effort": "low"},
                },
            },
            {
                "include_reasoning": False,
                "chat_template_kwargs": {
                    "enable_thinking": False,
                    "thinking": False,
                    "reasoning_effort": "none",
                },
            },
        ),
        (
            {
                "reasoning_effort": "high",
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            },
            {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
        ),
    ],
)
async def test_a_parser_is_told_what_it_asks_about(
    site: ToldSite, fields: dict[str, Any], told: dict[str, Any]
) -> None:
    await ask(site, max_tokens=1, **fields)
    (submit,) = site.submits
    assert orjson.loads(submit.chat) == told


async def test_a_parser_is_told_of_earlier_calls(site: ToldSite) -> None:
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": "level", "arguments": "{}"}}
        for i in range(2)
    ]
    messages: Any = [
        *HELLO,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-0", "content": "3"},
        {"role": "assistant", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "call-0", "content": "3"},
    ]
    await ask(site, messages=messages, max_tokens=1)
    assert orjson.loads(site.submits[0].chat) == {"history_tool_calls": 3}


async def test_a_completion_is_not_parsed(site: ToldSite) -> None:
    await site.client.completions.create(model="smol", prompt="hi", max_tokens=1)
    assert site.submits[0].chat == ""


# Replicas that can, and others


async def test_what_no_replica_can_is_a_400_that_names_the_field(smollm2: Path) -> None:
    async with told_site(smollm2, PLAIN, PLAIN) as site:
        for fields, field, message in (
            ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "hold a reply to a structure"),
            ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "find tool calls"),
            ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "find tool calls"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(site, **fields)
            assert refused.value.param == field
            assert f"no replica of 'smol' can {message}" in refused.value.message
        assert not site.submits
        await ask(site, tools=[TOOL])
        assert [submit.chat for submit in site.submits] == [""], "it is text, as the model says it"


async def test_what_one_replica_can_goes_there(smollm2: Path) -> None:
    async with told_site(smollm2, PLAIN, ABLE, PLAIN) as site:
        able = site.told[1]
        wanted: list[dict[str, Any]] = [
            {"response_format": {"type": "json_object"}},
            {"tools": [TOOL]},
            {"tools": [TOOL], "tool_choice": "required"},
        ]
        await asyncio.gather(
            *(ask(site, user=str(i), **fields) for fields in wanted for i in range(4))
        )
        assert len(able.submits) == len(site.submits) == 12
        for i in range(16):
            await ask(site, messages=[{"role": "system", "content": f"{i} locks. " * 9}, *HELLO])
        assert len(able.submits) < len(site.submits), "anything else goes anywhere"
        assert {bool(submit.chat) for submit in able.submits} == {True}
        assert not any(s.chat for told in site.told if told is not able for s in told.submits)
        await site.leaves(able)
        with pytest.raises(openai.BadRequestError):
            await ask(site, **wanted[0])
