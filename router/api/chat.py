"""POST /v1/chat/completions: its fields, and the shape of its answers."""

from typing import Any

import orjson

from hotbranch.v1.serve_pb2 import Delta
from router.api.errors import invalid
from router.api.fields import Fields
from router.api.logprobs import chat_logprobs
from router.api.schema import MAX_LOGPROBS
from router.api.shape import FINISH, Choice
from router.prompt.render import Chat
from router.prompt.tokenizer import Tokenizer


def read_chat(fields: Fields, add_special_tokens: bool = False) -> Chat:
    """The fields that make the prompt. Messages are checked where they are rendered."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("must be a list of at least one message", "messages")
    return Chat(
        messages=messages,
        tools=_tools(fields),
        documents=fields.objects("documents"),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=fields.flag("continue_final_message", False),
        template_kwargs=fields.mapping("chat_template_kwargs"),
        add_special_tokens=fields.flag("add_special_tokens", add_special_tokens),
    )


def read_logprobs(fields: Fields) -> int | None:
    """How many likely tokens to report beside each chosen one; None without logprobs."""
    wanted = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("needs logprobs", "top_logprobs")
    return (top or 0) if wanted else None


def _tools(fields: Fields) -> list[Any] | None:
    tools = fields.objects("tools")
    for i, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function":
            raise invalid("must be function", f"tools[{i}].type")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("must be a string", f"tools[{i}].function.name")
    choice = fields.raw("tool_choice")
    if choice not in (None, "none", "auto"):
        raise invalid("only none and auto are supported", "tool_choice")
    return tools or None


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self.id = f"chatcmpl-{request_id}"
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}' % index
        )

    def piece(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or delta.finish or (self._logprobs and delta.logprobs)):
            return b""
        text = b'"content":' + orjson.dumps(delta.text) if delta.text or not delta.finish else b""
        logprobs = b"null"
        if self._logprobs and delta.logprobs:
            logprobs = orjson.dumps(chat_logprobs(self._tokenizer, delta.logprobs))
        head = b'{"index":%d,"delta":{%b},"logprobs":%b,' % (index, text, logprobs)
        if not delta.finish:
            return head + b'"finish_reason":null}'
        return head + b'"finish_reason":"%b","stop_reason":%b}' % (
            FINISH[delta.finish].encode(),
            orjson.dumps(delta.stop_reason or None),
        )

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = chat_logprobs(self._tokenizer, choice.logprobs) if self._logprobs else None
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.texts),
                "refusal": None,
            },
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
