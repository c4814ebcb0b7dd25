"""Between the contract and the engine: pure translation, and what makes a submission invalid."""

import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from hotbranch.keys import TOKEN_BYTES
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1 import serve_pb2
from hotbranch.v1.cache_pb2 import CacheUpdate
from hotbranch.v1.serve_pb2 import Delta, Submit
from replicas.engine import Form, Namespace, Output, Request, Sampling, StoredRun, Structure

SNAPSHOT_KEYS = 1 << 14  # in one message; encoding more at once would hold the loop for too long


def invalid(submit: Submit, here: pb.Description) -> str:
    """Why a replica of this description can never run a submission; empty when it can."""
    size, sampling = len(submit.token_ids), submit.sampling
    count = size // TOKEN_BYTES
    if submit.model != here.model:
        return f"model {submit.model!r} is not served here, {here.model!r} is"
    if submit.rank >= here.ranks:
        return f"there is no rank {submit.rank}, the ranks are {here.ranks}"
    if submit.adapter and submit.adapter not in here.adapters:
        return f"adapter {submit.adapter!r} is not loaded"
    if sampling.HasField("structure") and not here.structures:
        return f"the {here.engine} engine cannot hold a reply to a structure"
    if size % TOKEN_BYTES:
        return f"token_ids has {size} bytes, not a multiple of {TOKEN_BYTES}"
    if not count:
        return "the prompt is empty"
    if count >= here.max_context:
        return f"the prompt has {count} tokens, the context, output included, {here.max_context}"
    if count > here.capacity_blocks * here.block_size:
        return f"the prompt has {count} tokens, more than the KV pool"
    largest = int(np.frombuffer(submit.token_ids, "<u4").max())
    for id in (largest, *sampling.stop_token_ids, *sampling.logit_bias):
        if id >= here.vocab_size:
            return f"token id {id} is outside the vocabulary of {here.vocab_size}"
    if not math.isfinite(submit.deadline_s):
        return f"deadline_s is {submit.deadline_s}"
    return _invalid_sampling(sampling, here.vocab_size)


def _invalid_sampling(sampling: serve_pb2.Sampling, vocab_size: int) -> str:
    floats = (sampling.temperature, sampling.frequency_penalty, sampling.presence_penalty)
    if not all(map(math.isfinite, (*floats, *sampling.logit_bias.values()))):
        return "temperature, penalties and logit_bias must be finite"
    for wrong, name, rule in (
        (sampling.max_tokens < 1, "max_tokens", "at least 1"),
        (sampling.min_tokens > sampling.max_tokens, "min_tokens", "at most max_tokens"),
        (sampling.temperature < 0, "temperature", "at least 0"),
        (not 0 <= sampling.top_p <= 1, "top_p", "between 0 and 1"),
        (not 0 <= sampling.min_p <= 1, "min_p", "between 0 and 1"),
        (not 0 <= sampling.repetition_penalty < math.inf, "repetition_penalty", "positive"),
        (sampling.logprobs > vocab_size, "logprobs", "at most the size of the vocabulary"),
        ("" in sampling.stop, "stop", "without empty strings"),
    ):
        if wrong:
            return f"{name} must be {rule}"
    return ""


def to_request(id: int, submit: Submit) -> Request:
    """The engine's form of a valid submission."""
    given = submit.sampling
    sampling = Sampling(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p or 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.seed if given.HasField("seed") else None,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        stop=tuple(given.stop),
        stop_token_ids=frozenset(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        logit_bias=dict(given.logit_bias),
        structure=_structure(given.structure),
        min_tokens=given.min_tokens,
        include_stop=given.include_stop,
        special_tokens=given.special_tokens,
    )
    return Request(
        id,
        Namespace(submit.model, submit.adapter, submit.salt),
        submit.token_ids,
        sampling,
        submit.priority,
        submit.request_id,
        submit.rank,
        submit.chat,
    )


def _structure(given: serve_pb2.Structure) -> Structure | None:
    form = given.WhichOneof("form")
    match form:
        case None:
            return None
        case "choices":
            return Structure(Form.CHOICES, tuple(given.choices.texts))
        case "json_object":
            return Structure(Form.JSON_OBJECT) if given.json_object else None
        case _:
            return Structure(Form[form.upper()], (getattr(given, form),))


def to_delta(ticket: int, output: Output) -> Delta:
    delta = Delta(
        ticket=ticket,
        token_ids=struct.pack(f"<{len(output.tokens)}I", *output.tokens),
        text=output.text,
        finish=f"FINISH_REASON_{output.finish.name}" if output.finish else None,
        cached_tokens=output.cached_tokens,
        error=output.error,
        stop_reason=output.stop_reason,
        reasoning=output.reasoning,
    )
    for call in output.tool_calls:
        delta.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    for entry in output.logprobs or ():
        delta.logprobs.add(
            token_id=entry.token,
            logprob=entry.logprob,
            top_ids=[token for token, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
    return delta


def to_snapshot(runs: Sequence[StoredRun], epoch: int, sequence: int) -> Iterator[CacheUpdate]:
    """Messages of at most SNAPSHOT_KEYS keys; long runs are cut."""
    update, room = CacheUpdate(epoch=epoch), SNAPSHOT_KEYS
    for run in runs:
        parent, start = run.parent, 0
        while start < len(run.keys):
            keys = run.keys[start : start + room]
            update.snapshot.runs.add(parent=parent, keys=keys, rank=run.rank, tier=run.tier)
            parent, start, room = keys[-1], start + len(keys), room - len(keys)
            if not room:
                yield update
                update, room = CacheUpdate(epoch=epoch), SNAPSHOT_KEYS
    update.snapshot.last = True
    update.snapshot.sequence = sequence
    yield update
