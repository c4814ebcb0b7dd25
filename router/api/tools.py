"""Which tools a reply may call, and what a parser of the reply is told of its request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.api.errors import invalid
from router.api.fields import Fields
from router.generation import Ability
from router.prompt.render import Chat


@dataclass(frozen=True, slots=True)
class Tools:
    """`choice` is none, auto, required or, as an object, the one function to call."""

    defined: list[dict[str, Any]] | None
    choice: str | dict[str, Any]
    parallel: bool = True  # more than one call in a reply

    @property
    def named(self) -> bool:
        return isinstance(self.choice, dict)

    @property
    def forced(self) -> bool:
        return self.named or self.choice == "required"


def read_tools(fields: Fields) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls`."""
    tools = [
        _tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.objects("tools") or [])
    ] or None
    choice = _choice(fields.raw("tool_choice"), tools)
    return Tools(tools, choice, fields.flag("parallel_tool_calls", True))


@dataclass(frozen=True, slots=True)
class Parsing:
    """What a reply is parsed for, if it is: the contract's `chat`, and who has to be able to."""

    chat: str = ""
    needs: Mapping[Ability, str] = field(default_factory=dict)
    wants: frozenset[Ability] = frozenset()


UNPARSED = Parsing()


def read_parsing(fields: Fields, chat: Chat, tools: Tools) -> Parsing:
    """Of a request whose messages have been rendered. A call that is forced takes a replica that
    finds it; one that may come, where there is such a replica."""
    told = _told(fields, chat, tools)
    if tools.forced:
        return Parsing(told, {Ability.PARSES: "tool_choice"})
    return Parsing(told, wants=frozenset([Ability.PARSES] if tools.choice == "auto" else []))


def _told(fields: Fields, chat: Chat, tools: Tools) -> str:
    calls = (message.get("tool_calls") for message in chat.messages if _assistant(message))
    told = {
        "tools": tools.defined,
        "tool_choice": tools.choice if tools.defined else None,
        "parallel_tool_calls": None if tools.parallel else False,
        "include_reasoning": None if fields.flag("include_reasoning", True) else False,
        "chat_template_kwargs": chat.template_kwargs or None,
        "history_tool_calls": sum(len(some or ()) for some in calls) or None,
    }
    return orjson.dumps({name: v for name, v in told.items() if v is not None}).decode()


def _assistant(message: dict[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _tool(tool: dict[str, Any], name: str) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function":
        raise invalid("must be function", f"{name}.type")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("must be a string", f"{name}.function.name")
    for part, kind, rule in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(function.get(part), kind | None):
            raise invalid(f"must be {rule}", f"{name}.function.{part}")
    return shown(function)


def shown(function: dict[str, Any]) -> dict[str, Any]:
    """A tool of a function, with the fields that vLLM knows, in its order: templates print them."""
    known = {part: function.get(part) for part in ("name", "description", "parameters")}
    if (strict := function.get("strict")) is not None:
        known["strict"] = strict
    return {"type": "function", "function": known}


def _choice(value: Any, tools: list[dict[str, Any]] | None) -> str | dict[str, Any]:
    if value is None:
        return "auto" if tools else "none"
    if value == "none":
        return "none"
    if not tools:
        raise invalid("needs tools", "tool_choice")
    if value in ("auto", "required"):
        return str(value)
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise invalid("must be none, auto, required or a function", "tool_choice")
    name = function.get("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid("must be that of one of the tools", "tool_choice.function.name")
    return {"type": "function", "function": {"name": name}}
