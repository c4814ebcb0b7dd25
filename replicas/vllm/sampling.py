"""Our sampling parameters in vLLM's terms, and vLLM's outputs in ours."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from replicas.engine import Finish, Form, Sampling, Structure, TokenLogprobs

FINISHES = {
    "stop": Finish.STOP,
    "repetition": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.CANCELLED,
    "error": Finish.ERROR,
}


def to_params(sampling: Sampling) -> SamplingParams:
    """Raises ValueError where vLLM refuses what is asked for."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=_seed(sampling.seed),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        logit_bias=sampling.logit_bias or None,
        structured_outputs=_structured(sampling.structure),
        min_tokens=sampling.min_tokens,
        include_stop_str_in_output=sampling.include_stop,
        skip_special_tokens=not sampling.special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )


def _seed(seed: int | None) -> int | None:
    """vLLM's seeds are signed."""
    return seed if seed is None or seed < 1 << 63 else seed - (1 << 64)


def _structured(structure: Structure | None) -> StructuredOutputsParams | None:
    match structure:
        case None:
            return None
        case Structure(Form.JSON_SCHEMA, (schema,)):
            return StructuredOutputsParams(json=json.loads(schema))
        case Structure(Form.JSON_OBJECT):
            return StructuredOutputsParams(json_object=True)
        case Structure(Form.REGEX, (regex,)):
            return StructuredOutputsParams(regex=regex)
        case Structure(Form.CHOICES, texts):
            return StructuredOutputsParams(choice=list(texts))
        case Structure(Form.GRAMMAR, (grammar,)):
            return StructuredOutputsParams(grammar=grammar)
        case Structure(Form.STRUCTURAL_TAG, (tag,)):
            return StructuredOutputsParams(structural_tag=tag)
        case _:
            raise ValueError(f"a structure of {len(structure.texts)} texts")


def to_logprobs(
    tokens: Sequence[int], entries: Sequence[Mapping[int, Logprob]] | None, top: int | None
) -> list[TokenLogprobs] | None:
    """One for each token, with the `top` most likely ones; None where none were asked for."""
    if top is None or entries is None:
        return None
    return [
        _token_logprobs(token, entry, top) for token, entry in zip(tokens, entries, strict=True)
    ]


def _token_logprobs(token: int, entry: Mapping[int, Logprob], top: int) -> TokenLogprobs:
    likely = sorted(entry.items(), key=_rank)[:top]
    return TokenLogprobs(
        token, entry[token].logprob, tuple((id, found.logprob) for id, found in likely)
    )


def _rank(item: tuple[int, Any]) -> int:
    rank: int | None = item[1].rank
    return 1 << 31 if rank is None else rank
