"""POST /v1/chat/completions: its fields, and the shape of its answers."""

from typing import Any

import orjson

from hotbranch.v1.serve_pb2 import Delta, ToolCall
from router.api.errors import invalid
from router.api.fields import Fields
from router.api.logprobs import chat_logprobs
from router.api.schema import MAX_LOGPROBS
from router.api.shape import FINISH, Choice
from router.api.tools import Tools
from router.prompt.render import Chat
from router.prompt.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_chat(fields: Fields, tools: Tools) -> Chat:
    """The fields that make the prompt. Messages are checked where they are rendered."""
    fields.refuse(["echo"], "is not supported")
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("must be a list of at least one message", "messages")
    return Chat(
        messages=messages,
        tools=tools.defined,
        documents=fields.objects("documents"),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=fields.flag("continue_final_message", False),
        template_kwargs=_template_kwargs(fields),
        add_special_tokens=fields.flag("add_special_tokens", False),
    )


def read_logprobs(fields: Fields) -> int | None:
    """How many likely tokens to report beside each chosen one; None without logprobs."""
    wanted = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("needs logprobs", "top_logprobs")
    return (top or 0) if wanted else None


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    effort = fields.string("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    return with_effort(fields.mapping("chat_template_kwargs"), effort)


def with_effort(given: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """What a template is told, of what is given for it and of how much to think, if that is said.

    As in vLLM.
    """
    if effort is None:
        return given
    return {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


class ChatShape:
    """chat.completion and chat.completion.chunk, as vLLM has them: `reasoning` beside the content,
    and calls that end a reply end it as tool_calls unless the request named the function.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, tokenizer: Tokenizer, logprobs: bool, tools: Tools) -> None:
        self.id = f"chatcmpl-{request_id}"
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._tools = tools
        self._called: set[int] = set()  # choices that have called

    def opening(self, index: int) -> bytes:
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}' % index
        )

    def piece(self, index: int, delta: Delta) -> bytes:
        message = self._message(index, delta)
        logprobs = b"null"
        if self._logprobs and delta.logprobs:
            logprobs = orjson.dumps(chat_logprobs(self._tokenizer, delta.logprobs))
            message = message or b'{"content":""}'
        if not (message or delta.finish):
            return b""
        head = b'{"index":%d,"delta":%b,"logprobs":%b,' % (index, message or b"{}", logprobs)
        if not delta.finish:
            return head + b'"finish_reason":null}'
        return head + b'"finish_reason":%b,"stop_reason":%b}' % (
            orjson.dumps(self._finish(FINISH[delta.finish], index in self._called)),
            orjson.dumps(delta.stop_reason or None),
        )

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for at, call in sorted(choice.calls.items())
            if self._shown(at)
        ]
        text = "".join(choice.texts)
        reasoning = "".join(choice.reasoning)
        silent = not text.strip() if calls else not text and reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if silent else text,
            "refusal": None,
            "reasoning": reasoning or None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._logprobs and choice.logprobs:
            logprobs = chat_logprobs(self._tokenizer, choice.logprobs)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish(choice.finish_reason, bool(calls)),
            "stop_reason": choice.stop_reason,
        }

    def _message(self, index: int, delta: Delta) -> bytes:
        """A chunk's delta as JSON, empty when it shows nothing."""
        if not (delta.reasoning or delta.tool_calls):
            return b'{"content":%b}' % orjson.dumps(delta.text) if delta.text else b""
        message: dict[str, Any] = {}
        if delta.reasoning:
            message["reasoning"] = delta.reasoning
        if delta.text:
            message["content"] = delta.text
        if calls := [_piece(call) for call in delta.tool_calls if self._shown(call.index)]:
            message["tool_calls"] = calls
            self._called.add(index)
        return orjson.dumps(message) if message else b""

    def _shown(self, call: int) -> bool:
        return call == 0 or self._tools.parallel

    def _finish(self, reason: str | None, called: bool) -> str | None:
        return "tool_calls" if called and reason == "stop" and not self._tools.named else reason


def _piece(call: ToolCall) -> dict[str, Any]:
    """The name comes once, and the id and the type with it."""
    piece: dict[str, Any] = {"index": call.index}
    function = {"arguments": call.arguments}
    if call.name:
        piece |= {"id": call.id, "type": "function"}
        function = {"name": call.name, **function}
    return {**piece, "function": function}
