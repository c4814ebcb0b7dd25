"""The prompts in a body that is passed on: read as vLLM reads them, and never a reason to refuse.

What cannot be read goes by load alone, and is counted by why.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.api.chat import with_effort
from router.api.completions import RawPrompt, read_prompts
from router.api.errors import ApiError
from router.api.fields import Fields
from router.api.tools import shown
from router.prompt.errors import PromptError
from router.prompt.messages import TEXT_PARTS
from router.prompt.models import Model
from router.prompt.render import Chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BYTES_PER_TOKEN = 4  # of a body whose tokens are not known
MOST_GUESSED = 8192  # tokens: a body may be a picture
# why a prompt is not known
ENDPOINT, JSON, MODEL, FIELD, MEDIA, SHAPE, TEMPLATE, TOKENS = REASONS = (
    "endpoint",  # another one than chats and completions
    "json",  # not an object
    "model",  # named by nobody, or of no tokenizer that we have
    "field",  # something else than these prompts goes into it
    "media",  # more than text
    "shape",  # not as the API has it
    "template",  # the chat template refuses it
    "tokens",  # read, but the server counts another number of tokens
)
# They change prompts in ways that are not followed here.
OTHER_FIELDS = (
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt_embeds",
    "suffix",
    "truncate_prompt_tokens",
)


class Unread(Exception):
    """The prompts are not known; `reason` is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reading:
    """Token ids of each prompt, as uint32 bytes; `alone` is one with one choice."""

    prompts: Sequence[bytes]
    alone: bool


def fields_of(body: bytes) -> Fields | None:
    """None where the body is no JSON object."""
    try:
        return Fields(body)
    except ApiError:
        return None


def text(fields: Fields | None, name: str) -> str:
    """A field that should be a string; empty where it is none."""
    value = fields.raw(name) if fields else None
    return value if isinstance(value, str) else ""


def streams(fields: Fields | None) -> bool:
    return fields is not None and fields.raw("stream") is True


def priority(fields: Fields | None) -> int:
    value = fields.raw("priority") if fields else 0
    return value if isinstance(value, int) and abs(value) < 1 << 31 else 0


def guessed_tokens(body: bytes) -> int:
    return max(1, min(MOST_GUESSED, len(body) // BYTES_PER_TOKEN))


def read(path: str, fields: Fields, model: Model) -> Reading:
    """Raises Unread. Takes some 1 ms for each kilobyte."""
    if any(fields.raw(name) not in (None, "") for name in OTHER_FIELDS):
        raise Unread(FIELD)
    try:
        if path == CHAT:
            prompts = [model.renderer.chat(_chat(fields))]
        else:
            several = read_prompts(fields, model.vocab_size, 1 << 30)
            special = fields.flag("add_special_tokens", True)
            prompts = [_encoded(prompt, model, special) for prompt in several]
    except ApiError:
        raise Unread(SHAPE) from None
    except PromptError as error:
        raise Unread(SHAPE if error.param != "messages" else TEMPLATE) from None
    if not all(prompts):
        raise Unread(SHAPE)
    choices = {fields.raw("n"), fields.raw("best_of")} <= {None, 1}
    return Reading(prompts, choices and len(prompts) == 1)


def _chat(fields: Fields) -> Chat:
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise Unread(SHAPE)
    if any(_has_media(message) for message in messages):
        raise Unread(MEDIA)
    return Chat(
        messages=messages,
        tools=[_tool(tool) for tool in fields.objects("tools") or ()] or None,
        documents=fields.objects("documents"),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=fields.flag("continue_final_message", False),
        template_kwargs=with_effort(
            fields.mapping("chat_template_kwargs"), fields.string("reasoning_effort") or None
        ),
        add_special_tokens=fields.flag("add_special_tokens", False),
    )


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") not in TEXT_PARTS for part in content
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise Unread(SHAPE)
    return shown(function)


def _encoded(prompt: RawPrompt, model: Model, special: bool) -> bytes:
    if isinstance(prompt, str):
        return model.renderer.text(prompt, special)
    return array("I", prompt).tobytes()
