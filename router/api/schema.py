"""What /v1/chat/completions and /v1/completions have in common: the generation parameters.

Names, ranges and defaults are OpenAI's, with vLLM's extensions (top_k, min_p, repetition_penalty,
min_tokens, stop_token_ids, include_stop_str_in_output, ignore_eos, skip_special_tokens, structures,
priority, cache_salt). A field that would change the reply and is not supported is refused; one that
would not, and one that neither knows, is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotbranch.v1.serve_pb2 import Sampling, Structure
from router.api.errors import ApiError, invalid
from router.api.fields import Fields, integer, number, token_ids
from router.api.structure import read_structure
from router.generation import Ability
from router.prompt.models import Model

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_NAME = 1024  # characters of user, cache_salt and the like
LEAST = 1e-30  # above zero in a 32-bit float, where the contract reads zero as "not set"
SEEDS = 1 << 64
UNSUPPORTED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "functions",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logprob_token_ids",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "return_prompt_text",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
)


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate, beside the prompt. `max_tokens` None: up to the end of the context. `needs`
    are what a replica must be able to do, each with the field that asks for it."""

    sampling: Sampling  # max_tokens and the seed of a choice are set by `samplings`
    n: int
    seed: int | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str
    needs: Mapping[Ability, str]

    def samplings(self, prompt_tokens: int, max_context: int, param: str) -> list[Sampling]:
        """One for each choice. Choices of a seeded request take consecutive seeds, as in vLLM.

        Raises a 400 when the prompt, which came in the field `param`, is empty, or does not fit the
        context with max_tokens behind it.
        """
        room = max_context - prompt_tokens
        if prompt_tokens < 1:
            raise invalid("must have at least one token", param)
        if room < 1:
            raise _too_long(f"the prompt has {prompt_tokens} tokens", max_context, param)
        if self.max_tokens is not None and self.max_tokens > room:
            wanted = f"{prompt_tokens} prompt tokens and {self.max_tokens} more are wanted"
            raise _too_long(wanted, max_context, "max_tokens")
        most = room if self.max_tokens is None else self.max_tokens
        if self.sampling.min_tokens > most:
            raise invalid(f"must be at most max_tokens, which is {most}", "min_tokens")
        samplings = []
        for choice in range(self.n):
            sampling = Sampling()
            sampling.CopyFrom(self.sampling)
            sampling.max_tokens = most
            if self.seed is not None:
                sampling.seed = (self.seed + choice) % SEEDS
            samplings.append(sampling)
        return samplings


def options(
    fields: Fields,
    model: Model,
    max_choices: int,
    logprobs: int | None,
    default_tokens: int | None,
) -> Options:
    """Read the parameters; `logprobs` differs between the endpoints and comes from the caller."""
    stream = fields.flag("stream", False)
    include_usage = _include_usage(fields, stream)
    n = fields.integer("n", 1, max_choices)
    for name in ("user", "prompt_cache_key"):
        _short(fields.string(name), name)
    fields.refuse(UNSUPPORTED, "is not supported")
    structure, asked = read_structure(fields)
    return Options(
        sampling=_sampling(fields, model, logprobs, structure),
        n=1 if n is None else n,
        seed=fields.integer("seed", -(SEEDS // 2), SEEDS - 1),
        max_tokens=_max_tokens(fields, default_tokens),
        stream=stream,
        include_usage=include_usage,
        priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        cache_salt=_short(fields.string("cache_salt"), "cache_salt"),
        needs={Ability.STRUCTURES: asked} if structure else {},
    )


def _sampling(
    fields: Fields, model: Model, logprobs: int | None, structure: Structure | None
) -> Sampling:
    top_k = fields.integer("top_k", -1, (1 << 31) - 1) or 0
    top_p = fields.number("top_p", 0.0, 1.0, 1.0)
    repetition = fields.number("repetition_penalty", 0.0, 100.0, 1.0)
    for name, value in (("top_p", top_p), ("repetition_penalty", repetition)):
        if value == 0.0:
            raise invalid("must be above 0", name)
    return Sampling(
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),
        top_p=max(top_p, LEAST),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=max(repetition, LEAST),
        stop=_stops(fields.raw("stop")),
        stop_token_ids=_stop_token_ids(fields.raw("stop_token_ids"), model.vocab_size),
        ignore_eos=fields.flag("ignore_eos", False),
        logprobs=logprobs,
        logit_bias=_logit_bias(fields, model.vocab_size),
        structure=structure,
        min_tokens=fields.integer("min_tokens", 0, (1 << 31) - 1),
        include_stop=fields.flag("include_stop_str_in_output", False),
        special_tokens=not fields.flag("skip_special_tokens", True),
    )


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise invalid("must be a string or a list of strings", "stop")
    if len(value) > MAX_STOPS:
        raise invalid(f"may have at most {MAX_STOPS} strings", "stop")
    if not all(value):
        raise invalid("may not contain an empty string", "stop")
    return value


def _stop_token_ids(value: Any, vocab_size: int) -> list[int]:
    return [] if value is None else token_ids(value, "stop_token_ids", vocab_size)


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, value in fields.mapping("logit_bias").items():
        name = f"logit_bias.{key[:32]}"
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise invalid("must be a token id", name)
        biases[integer(int(key), name, 0, vocab_size - 1)] = number(value, name, -100.0, 100.0)
    return biases


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := fields.integer(name, 1, (1 << 31) - 1)) is not None:
            return value
    return default


def _include_usage(fields: Fields, stream: bool) -> bool:
    settings = fields.mapping("stream_options")
    if settings and not stream:
        raise invalid("is only allowed with stream", "stream_options")
    value = settings.get("include_usage")
    if not isinstance(value, bool | None):
        raise invalid("must be true or false", "stream_options.include_usage")
    return bool(value)


def _short(value: str | None, name: str) -> str:
    if value is not None and len(value) > MAX_NAME:
        raise invalid(f"may have at most {MAX_NAME} characters", name)
    return value or ""


def _too_long(wanted: str, context: int, param: str) -> ApiError:
    message = f"{wanted}, but the context has {context} tokens"
    return invalid(message, param, code="context_length_exceeded")
