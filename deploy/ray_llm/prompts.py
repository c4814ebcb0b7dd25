"""What a call of an LLM deployment asks to be computed: token ids, and in which namespace.

Ray hands the router whatever the deployment is called with: requests of `ray.serve.llm`, which are
pydantic models, plain JSON objects, or neither. The same objects go on to the replica, so that
nothing is touched that can be read only once.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel
from xxhash import xxh3_64_hexdigest

from hotbranch.embedded import resolve_model
from hotbranch.keys import TOKEN_BYTES, root
from hotbranch.settings import Common
from router.prompt.errors import PromptError
from router.prompt.messages import TEXT_PARTS
from router.prompt.render import Chat, Renderer

MAX_DEPTH = 64  # of JSON values


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` (little-endian uint32) of the first prompt of a call, `tokens` of all of them. `seed`
    is the root of its namespace. `degraded` says why its text stands in for token ids, where a
    model was to make these.
    """

    ids: bytes
    tokens: int
    seed: int
    degraded: str = ""


class Unread(Exception):
    """There is no prompt to go by; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Reader:
    """Reads calls; safe in threads. Without a renderer four bytes of text count as a token."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer

    @classmethod
    def load(cls, model: str) -> "Reader":
        """For a directory in the Hugging Face layout, smollm2, or "" for none.

        Raises ModelError, OSError or ValueError when there is no usable tokenizer.
        """
        if not model:
            return cls(None)
        _, directory = resolve_model(model, Common().cache_dir)
        return cls(Renderer.load(directory))

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any], adapter: str) -> Prompt:
        """The prompt among the arguments of a call, for a LoRA adapter ("" for none). Raises
        Unread."""
        request = next((one for one in (*args, *kwargs.values()) if _has_prompt(one)), None)
        if request is None:
            raise Unread("no_prompt")
        degraded = ""
        if _field(request, "messages") is not None:
            prompts = [self._chat(request)]
            if self._renderer and not prompts[0]:
                prompts, degraded = [_spelled(request)], "template"
        else:
            special = _field(request, "add_special_tokens") is not False
            prompts = [self._prompt(one, special) for one in _prompts(_field(request, "prompt"))]
        tokens = sum(map(len, prompts)) // TOKEN_BYTES
        if not tokens:
            raise Unread("empty")
        model, salt = _field(request, "model"), _field(request, "cache_salt")
        seed = root(str(model or ""), adapter, str(salt or ""))
        return Prompt(prompts[0], tokens, seed, degraded)

    def _chat(self, request: Any) -> bytes:
        """Ids of a conversation; none where the model's template refuses it."""
        if self._renderer is None:
            return _spelled(request)
        generates = _field(request, "add_generation_prompt")
        chat = Chat(
            messages=_objects(request, "messages"),
            tools=_objects(request, "tools") or None,
            documents=_objects(request, "documents") or None,
            add_generation_prompt=generates is None or bool(generates),
            continue_final_message=bool(_field(request, "continue_final_message")),
            template_kwargs=_template_kwargs(request),
            add_special_tokens=bool(_field(request, "add_special_tokens")),
        )
        try:
            return self._renderer.chat(chat) if chat.messages else b""
        except PromptError:
            return b""

    def _prompt(self, prompt: str | list[int], special: bool) -> bytes:
        if isinstance(prompt, list):
            return _ids(prompt)
        return self._renderer.text(prompt, special) if self._renderer else _as_ids(_utf8(prompt))


def _has_prompt(value: Any) -> bool:
    return any(_field(value, name) is not None for name in ("messages", "prompt"))


def _field(request: Any, name: str) -> Any:
    return request.get(name) if isinstance(request, dict) else getattr(request, name, None)


def _objects(request: Any, name: str) -> list[Any]:
    """A list of JSON values, empty where it is absent."""
    value = _plain(_field(request, name))
    if not isinstance(value, list | None):
        raise Unread("shape")
    return value or []


def _template_kwargs(request: Any) -> dict[str, Any]:
    value = _plain(_field(request, "chat_template_kwargs"))
    if not isinstance(value, dict | None):
        raise Unread("shape")
    return value or {}


def _plain(value: Any, depth: int = 0) -> Any:
    """A JSON value of a pydantic model, or of what contains some. Raises Unread for others, such as
    iterators, which the replica would find empty."""
    if depth > MAX_DEPTH:
        raise Unread("shape")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, BaseModel):
        return {name: _plain(item, depth + 1) for name, item in value}
    raise Unread("shape")


def _prompts(value: Any) -> Iterable[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise Unread("shape")
    if value and all(isinstance(item, str | list) for item in value):
        return value
    return [value]


def _ids(prompt: list[int]) -> bytes:
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        raise Unread("shape") from None


def _spelled(request: Any) -> bytes:
    """A conversation as text, in the order in which templates write it."""
    head = [_objects(request, "tools"), _objects(request, "documents"), _template_kwargs(request)]
    messages = [_light(message) for message in _objects(request, "messages")]
    if not messages:
        return b""
    try:
        return _as_ids(orjson.dumps([head, *messages]))
    except TypeError:  # lone surrogates, integers of more than 64 bits
        raise Unread("shape") from None


def _light(message: Any) -> Any:
    """A message with digests in place of pictures and the like, which are far more bytes than
    tokens."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [part if _is_text(part) else _digest(part) for part in content]}


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") in TEXT_PARTS)


def _digest(part: Any) -> str:
    return xxh3_64_hexdigest(orjson.dumps(part))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _as_ids(text: bytes) -> bytes:
    return text + bytes(-len(text) % TOKEN_BYTES)
