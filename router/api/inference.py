"""The endpoints that turn text or messages into tokens: chat, completions, tokenize, detokenize."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import orjson

from router.api import chat, completions, schema
from router.api.errors import ApiError, invalid, unknown_model
from router.api.fields import Fields, token_ids
from router.api.generate import Call, Generator
from router.api.http import Headers, Request, Response
from router.api.shape import Shape
from router.api.tenancy import Caller, Tenants
from router.api.tools import UNPARSED, Parsing, read_parsing, read_tools
from router.generation import Prompt
from router.prompt.errors import PromptError
from router.prompt.models import Catalog, Model
from router.prompt.render import Chat

OFF_LOOP_BYTES = 16 << 10  # a larger body is tokenised in a thread: some 1 ms for each kilobyte

_SESSION = re.compile(r"[ -~]{1,256}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks, what, of which model, and of which adapter of it if any."""

    caller: Caller
    fields: Fields
    model: Model
    adapter: str


@dataclass(frozen=True, slots=True)
class Inference:
    """Handlers. `now` gives seconds since the epoch, for the `created` field of answers."""

    catalog: Catalog
    tenants: Tenants
    generator: Generator
    max_choices: int
    deadline_s: float
    now: Callable[[], float]

    async def chat(self, request: Request) -> Response:
        asked = self._open(request)
        fields, model = asked.fields, asked.model
        logprobs = chat.read_logprobs(fields)
        options = schema.options(fields, model, self.max_choices, logprobs, None)
        tools = read_tools(fields)
        conversation = chat.read_chat(fields, tools)
        ids = await _tokenised(request, lambda: _render(model, conversation))
        parsing = read_parsing(fields, conversation, tools)
        tokenizer = model.renderer.tokenizer
        shape = chat.ChatShape(request.request_id, tokenizer, logprobs is not None, tools)
        return await self._answer(request, asked, options, "messages", [ids], shape, parsing)

    async def completions(self, request: Request) -> Response:
        asked = self._open(request)
        fields, model = asked.fields, asked.model
        tokenizer = model.renderer.tokenizer
        logprobs = completions.read_logprobs(fields)
        options = schema.options(
            fields, model, self.max_choices, logprobs, completions.DEFAULT_TOKENS
        )
        echo = completions.read_echo(fields)
        prompts = completions.read_prompts(fields, model.vocab_size, self.max_choices)
        special = fields.flag("add_special_tokens", True)
        ids = await _tokenised(
            request,
            lambda: [completions.encode(prompt, tokenizer, special) for prompt in prompts],
        )
        echoes = [completions.echoed(prompt, tokenizer) for prompt in prompts] if echo else []
        shape = completions.CompletionShape(
            request.request_id,
            tokenizer,
            logprobs is not None,
            [text for text in echoes for _ in range(options.n)],
        )
        return await self._answer(request, asked, options, "prompt", ids, shape, UNPARSED)

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: {prompt} or {messages} to {count, max_model_len, tokens, token_strs}."""
        asked = self._open(request, alone=True)
        fields, model = asked.fields, asked.model
        tokenizer = model.renderer.tokenizer
        if fields.raw("messages") is not None:
            conversation = chat.read_chat(fields, read_tools(fields))
            encoded = await _tokenised(request, lambda: _render(model, conversation))
        else:
            prompt = fields.string("prompt")
            if prompt is None:
                raise invalid("prompt or messages is required", "prompt")
            special = fields.flag("add_special_tokens", True)
            encoded = await _tokenised(
                request, lambda: completions.encode(prompt, tokenizer, special)
            )
        ids = memoryview(encoded).cast("I").tolist()
        strings = None
        if fields.flag("return_token_strs", False):
            strings = [tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids]
        answer = {
            "count": len(ids),
            "max_model_len": model.max_context,
            "tokens": ids,
            "token_strs": strings,
        }
        return Response(200, orjson.dumps(answer))

    async def detokenize(self, request: Request) -> Response:
        """vLLM's: {tokens} to {prompt}."""
        asked = self._open(request, alone=True)
        model = asked.model
        ids = token_ids(asked.fields.raw("tokens"), "tokens", model.vocab_size)
        text = await _tokenised(request, lambda: model.renderer.tokenizer.decode(ids))
        return Response(200, orjson.dumps({"prompt": text}))

    def _open(self, request: Request, alone: bool = False) -> Asked:
        """Read a request; `alone` lets a sole model go without its name."""
        caller = self.tenants.caller(request.headers)
        fields = Fields(request.body)
        name = fields.string("model")
        if not name and alone and len(self.catalog.models) == 1:
            return Asked(caller, fields, next(iter(self.catalog.models.values())), "")
        if not name:
            raise invalid("is required", "model")
        found = self.catalog.find(name)
        if found is None:
            raise unknown_model(name)
        return Asked(caller, fields, *found)

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        options: schema.Options,
        param: str,
        ids: Sequence[bytes],
        shape: Shape,
        parsing: Parsing,
    ) -> Response:
        salt = asked.caller.namespace_salt(options.cache_salt)
        prompts = [
            Prompt(
                model=asked.model.name,
                token_ids=prompt,
                tenant=asked.caller.tenant,
                request_id=request.request_id,
                salt=salt,
                adapter=asked.adapter,
                priority=options.priority,
                deadline_s=self.deadline_s,
                session=session_of(request.headers),
                chat=parsing.chat,
                needs={**options.needs, **parsing.needs},
                wants=parsing.wants,
            )
            for prompt in ids
        ]
        created = int(self.now())
        call = Call(request.path, param, prompts, options, asked.model.max_context, shape, created)
        return await self.generator.answer(call)


def session_of(headers: Headers) -> str:
    """The session as its client names it; empty where it does not, or by no fit name."""
    given = headers.get("x-session-id")
    return given if given and _SESSION.fullmatch(given) else ""


def _render(model: Model, conversation: Chat) -> bytes:
    try:
        return model.renderer.chat(conversation)
    except PromptError as error:
        raise ApiError(400, f"{error.param}: {error}", error.param) from error


async def _tokenised(request: Request, work: Callable[[], T]) -> T:
    if len(request.body) < OFF_LOOP_BYTES:
        return work()
    return await asyncio.to_thread(work)
