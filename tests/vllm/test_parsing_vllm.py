"""Tool calls and reasoning, found by vLLM's parsers in the form that our contract has."""

import json
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.parser.utils import count_chat_history_tool_calls
from vllm.sampling_params import SamplingParams

from hotbranch.embedded import ensure
from hotbranch.settings import Common
from replicas.engine import Finish, Namespace, Output, Request, Sampling, TokenLogprobs
from replicas.vllm.parsing import Parsers, Parsing

TOOL = {"type": "function", "function": {"name": "level", "parameters": {"type": "object"}}}


class Site:
    """Parsers over the tokenizer of the embedded model, without an engine."""

    def __init__(self, tools: str = "", reasoning: str = "") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(ensure(Common().cache_dir))
        config: Any = SimpleNamespace(model="m", hf_config=SimpleNamespace(model_type="llama"))
        self.parsers = Parsers(tools, reasoning, self.tokenizer, config)
        self.params = SamplingParams()

    def open(self, chat: dict[str, Any]) -> Parsing:
        prompt = struct.pack("<3I", 1, 2, 3)
        request = Request(1, Namespace("m"), prompt, Sampling(9), chat=json.dumps(chat))
        parsing = self.parsers.open(request, self.params)
        assert parsing is not None
        return parsing

    def parse(self, text: str, **chat: Any) -> tuple[str, str, dict[int, tuple[str, str]]]:
        """(content, reasoning, calls by index) of a reply that comes token by token."""
        parsing = self.open(chat)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        content, reasoning, calls = "", "", {}
        for number, id in enumerate(ids):
            output = Output(1, [id], self.tokenizer.decode([id]))
            output.finish = Finish.STOP if number == len(ids) - 1 else None
            parsing.push(output)
            content += output.text
            reasoning += output.reasoning
            for call in output.tool_calls:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = name + call.name, arguments + call.arguments
        return content, reasoning, calls


def test_calls_come_out_of_the_text() -> None:
    text = (
        'Let me see. <tool_call>\n{"name": "level", "arguments": {"lock": 3}}\n</tool_call>'
        '<tool_call>\n{"name": "level", "arguments": {"lock": 4}}\n</tool_call>'
    )
    content, reasoning, calls = Site(tools="hermes").parse(text, tools=[TOOL])
    assert content.strip() == "Let me see."
    assert reasoning == ""
    assert [calls[index][0] for index in (0, 1)] == ["level", "level"]
    assert [json.loads(calls[index][1]) for index in (0, 1)] == [{"lock": 3}, {"lock": 4}]


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>{"name": "level", "arguments": {}}</tool_call>'
    content, _, calls = Site(tools="hermes").parse(text)
    assert content == text
    assert not calls


def test_reasoning_comes_out_of_the_text() -> None:
    site = Site(reasoning="olmo3")
    content, reasoning, _ = site.parse("<think>It is even.</think>Four.")
    assert (content.strip(), reasoning.strip()) == ("Four.", "It is even.")
    content, reasoning, _ = site.parse("<think>It is even.</think>Four.", include_reasoning=False)
    assert (content.strip(), reasoning) == ("Four.", "")


def test_logprobs_do_not_tell_reasoning_that_is_left_out() -> None:
    site = Site(reasoning="olmo3")
    for told, kept in (({}, True), ({"include_reasoning": False}, False)):
        parsing = site.open(told)
        output = Output(1, [5], "<think>", logprobs=[TokenLogprobs(5, -1.0, ())])
        parsing.push(output)
        assert bool(output.logprobs) == kept


def test_a_parser_knows_how_many_calls_there_were() -> None:
    site = Site(tools="hermes")
    for count in (0, 3):
        chat = site.open({"history_tool_calls": count} if count else {})._chat
        assert count_chat_history_tool_calls(chat.messages) == count


def test_special_tokens_are_shown_where_the_client_or_the_parser_wants_them() -> None:
    for asked, tools, shown in ((False, [], False), (True, [], True), (False, [TOOL], True)):
        site = Site(tools="hermes")
        site.params.skip_special_tokens = not asked
        site.open({"tools": tools} if tools else {})
        assert site.params.skip_special_tokens != shown


def test_required_tools_bind_the_reply() -> None:
    site = Site(tools="hermes")
    site.parse("x", tools=[TOOL], tool_choice="required")
    assert site.params.structured_outputs is not None


def test_a_chat_without_a_parser_is_not_parsed() -> None:
    request = Request(1, Namespace("m"), b"\1\0\0\0", Sampling(9))
    assert Site(tools="hermes").parsers.open(request, SamplingParams()) is None


def test_names_that_vllm_does_not_know() -> None:
    with pytest.raises(ValueError, match="no_such"):
        Site(tools="no_such")
    with pytest.raises(ValueError, match="no_such"):
        Site(reasoning="no_such")
    with pytest.raises(ValueError, match="deepseek_r1"):
        Site(reasoning="deepseek_r1")  # this vocabulary has no <think>
