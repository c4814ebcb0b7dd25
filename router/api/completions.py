"""POST /v1/completions: its fields, and the shape of its answers."""

from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from hotbranch.v1.serve_pb2 import Delta, TokenLogprobs
from router.api.errors import invalid
from router.api.fields import Fields, token_ids
from router.api.logprobs import completion_logprobs
from router.api.schema import MAX_LOGPROBS
from router.api.shape import FINISH, Choice
from router.prompt.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # of an answer without max_tokens, as OpenAI and vLLM have it here

RawPrompt = str | list[int]


def read_prompts(fields: Fields, vocab_size: int, limit: int) -> list[RawPrompt]:
    """One prompt or several, each a text or a list of token ids."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("must be a text, token ids, or a list of these", "prompt")
    if not isinstance(value[0], str | list):
        return [token_ids(value, "prompt", vocab_size)]
    if len(value) > limit:
        raise invalid(f"may have at most {limit} prompts", "prompt")
    return [
        item if isinstance(item, str) else token_ids(item, f"prompt[{i}]", vocab_size)
        for i, item in enumerate(value)
    ]


def read_logprobs(fields: Fields) -> int | None:
    return fields.integer("logprobs", 0, MAX_LOGPROBS)


def read_echo(fields: Fields) -> bool:
    echo = fields.flag("echo", False)
    if echo and fields.raw("logprobs") is not None:
        raise invalid("cannot go with logprobs", "echo")
    if fields.integer("best_of", 1, 1 << 31) not in (
        None,
        1,
        fields.integer("n", 1, 1 << 31),
    ):
        raise invalid("must equal n", "best_of")
    fields.refuse(["suffix"], "is not supported")
    return echo


def encode(prompt: RawPrompt, tokenizer: Tokenizer, add_special_tokens: bool) -> bytes:
    if isinstance(prompt, str):
        return tokenizer.encode_text(prompt, add_special_tokens)
    return array("I", prompt).tobytes()


def echoed(prompt: RawPrompt, tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


class CompletionShape:
    """text_completion. `echo` has the text to repeat for each choice, or is empty."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request_id: str, tokenizer: Tokenizer, logprobs: bool, echo: Sequence[str]
    ) -> None:
        self.id = f"cmpl-{request_id}"
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        if not self._echo:
            return b""
        return orjson.dumps(_choice(index, self._echo[index], None, None, None))

    def piece(self, index: int, delta: Delta) -> bytes:
        if not (delta.text or delta.finish or (self._logprobs and delta.logprobs)):
            return b""
        logprobs = self._tokens(index, delta.logprobs) if delta.logprobs else None
        finish = FINISH[delta.finish] if delta.finish else None
        return orjson.dumps(_choice(index, delta.text, logprobs, finish, delta.stop_reason or None))

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        if self._echo:
            text = self._echo[index] + text
        logprobs = self._tokens(index, choice.logprobs)
        return _choice(index, text, logprobs, choice.finish_reason, choice.stop_reason)

    def _tokens(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offset = self._offsets.get(index, 0)
        result, self._offsets[index] = completion_logprobs(self._tokenizer, tokens, offset)
        return result


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
