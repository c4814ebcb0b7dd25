"""Chat messages as clients send them, checked and brought into the form that templates expect."""

import json
from typing import Any

from router.prompt.errors import PromptError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
REASONING = ("reasoning", "reasoning_content")  # vLLM's name, and the older one
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def normalise(messages: list[Any], parts: bool) -> list[dict[str, Any]]:
    """Messages for a template that takes content as a list of parts, or as a string.

    Absent and null fields are left out, null content is empty, the arguments of tool calls are
    objects, and an assistant's reasoning has both names that templates know it by. Where the
    template wants a string, the texts of a list are joined by a newline, as in vLLM. Raises
    PromptError naming the field.
    """
    return [_message(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def _message(message: Any, where: str, parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise PromptError("must be an object with a role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    for name in ("name", "tool_call_id", *REASONING):
        if not isinstance(message.get(name), str | None):
            raise PromptError("must be a string", f"{where}.{name}")
    result = {name: value for name, value in message.items() if value is not None}
    result["content"] = _content(message.get("content"), f"{where}.content", parts)
    if role == "assistant" and (thought := [result[name] for name in REASONING if name in result]):
        result |= dict.fromkeys(REASONING, thought[0])
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    return result


def _content(content: Any, where: str, parts: bool) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError("must be a string or a list of parts", where)
    texts = [_text(part, f"{where}[{j}]") for j, part in enumerate(content)]
    if parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PromptError("must be an object with a type", where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        shown = f"{kind[:64]!r} " if isinstance(kind, str) else ""
        raise PromptError(f"{shown}is not supported: this model reads text only", f"{where}.type")
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise PromptError("must be a string", f"{where}.{field}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise PromptError("must be a list", where)
    return [_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise PromptError("must be an object", f"{where}.function")
    if not isinstance(function.get("name"), str):
        raise PromptError("must be a string", f"{where}.function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise PromptError("must be a JSON object", f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
