"""Requests of our own, through router and engine: what each says of the same prompt."""

import secrets
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.doctor import replica as replicas
from deploy.doctor.finding import Finding, ok, warning, wrong
from deploy.doctor.router import Client, Fleet, name
from hotbranch.keys import block_keys, root
from hotbranch.v1.replica_pb2 import Description

BLOCKS = 6  # of the probe
ARRIVES_S = 1.0  # for a report to reach the router
# Letters of many scripts, a control token as text, and white space that tokenizers fold or keep.
AWKWARD = "Ünïcödé, 日本語, العربية, 😀 <|im_start|>system\n\n\ttab  and  spaces…"


@dataclass(frozen=True, slots=True)
class Asked:
    """What came back for a probe. `cached` None is: it was not told."""

    replica: str
    prompt_tokens: int
    cached: int | None
    predicted: int


def probe(
    client: Client, model: str, fleet: Fleet, found: Mapping[str, Description]
) -> Iterator[Finding]:
    """A prompt that nobody has seen, twice, and once more under another salt."""
    size = replicas.largest_block([here for here in found.values() if here.model == model])
    body = _body(model, size)
    tokens = client.post("/tokenize", {"model": model, "messages": body["messages"]})
    if tokens.status != 200:
        mend = "ask with a model and a key that the router knows"
        yield wrong(model, f"/tokenize answers {tokens.status}", mend)
        return
    ids: list[int] = tokens.body["tokens"]
    before = _recoveries(client)
    first = _ask(client, body)
    if isinstance(first, Finding):
        yield first
        return
    yield from _tokens(model, ids, first)
    second = _ask(client, body)
    if isinstance(second, Finding):
        yield second
        return
    yield from _reuse(model, len(ids), first, second, size)
    salted = _ask(client, {**body, "cache_salt": secrets.token_hex(8)})
    yield from _salt(model, salted)
    yield from _events(client, model, ids, second.replica, fleet, found)
    if _recoveries(client) != before:
        what = "a replica's reports broke off while we asked"
        yield warning(model, what, "see `recoveries` in /admin/replicas, and the network between")


def _body(model: str, block_size: int) -> dict[str, Any]:
    unique = " ".join(secrets.token_hex(3) for _ in range(BLOCKS * block_size // 4))
    messages = [
        {"role": "system", "content": f"Probe {unique}. {AWKWARD}"},
        {"role": "user", "content": "Say yes."},
    ]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}


def _ask(client: Client, body: Mapping[str, Any]) -> Asked | Finding:
    answer = client.post("/v1/chat/completions", body)
    if answer.status != 200:
        said = (answer.body or {}).get("error", {}).get("message", "")
        return wrong(body["model"], f"a chat is answered {answer.status}: {said}", "see the log")
    usage = answer.body["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Asked(
        answer.headers.get("x-hotbranch-replica", ""),
        usage["prompt_tokens"],
        details.get("cached_tokens"),
        int(answer.headers.get("x-hotbranch-predicted-tokens", 0)),
    )


def _tokens(model: str, ids: list[int], asked: Asked) -> Iterator[Finding]:
    if asked.prompt_tokens != len(ids):
        yield wrong(
            model,
            f"the router counts {len(ids)} tokens in a prompt, the engine {asked.prompt_tokens}",
            "give the router the model directory that the engine serves",
        )
    elif len(ids) > 1 and ids[0] == ids[1]:
        what = f"a chat begins with token {ids[0]} twice: the template adds it, and the tokenizer"
        yield wrong(model, what, "take it out of the chat template or of the tokenizer's settings")
    else:
        yield ok(model, f"router and engine agree on a prompt of {len(ids)} tokens")


def _reuse(model: str, count: int, first: Asked, second: Asked, size: int) -> Iterator[Finding]:
    expected = (count - 1) // size * size
    if second.cached is None:
        mend = "for vLLM give --enable-prompt-tokens-details, for SGLang --enable-cache-report"
        yield warning(model, "the engine does not say what it had cached", mend)
    elif second.replica != first.replica:
        what = f"the same prompt went to {first.replica}, then to {second.replica}"
        yield warning(model, what, "right if the first is busy; else see x-hotbranch headers")
    elif second.cached < expected:
        what = f"asked again, {second.cached} of {expected} tokens were cached"
        yield wrong(model, what, "switch prefix caching on, or give the engine more KV cache")
    elif second.predicted != second.cached:
        what = f"the router predicted {second.predicted} cached tokens, {second.cached} were"
        yield wrong(model, what, "see whether the engine's events reach the router")
    else:
        yield ok(model, f"asked again, {second.cached} tokens were cached, as predicted")


def _salt(model: str, salted: Asked | Finding) -> Iterator[Finding]:
    if isinstance(salted, Finding):
        yield salted
    elif salted.cached:
        what = f"{salted.cached} tokens were cached under a salt that nobody had used"
        yield wrong(model, what, "use an engine that separates by cache_salt before tenants do")
    elif salted.cached == 0:
        yield ok(model, "another cache_salt shares nothing")


def _events(
    client: Client,
    model: str,
    ids: list[int],
    at: str,
    fleet: Fleet,
    found: Mapping[str, Description],
) -> Iterator[Finding]:
    here = found.get(at)
    address = next((each["address"] for each in fleet.replicas if name(each) == at), None)
    if here is None or address is None:
        return
    data = struct.pack(f"<{len(ids)}I", *ids)
    keys = set(block_keys(data, here.block_size, root(model)))
    holds = replicas.held(address)
    if holds is None:
        yield warning(at, "it does not report what it caches", "placement goes by history there")
        return
    if not keys <= holds:
        if client.api_key:
            yield warning(at, "its reports cannot be checked under a tenant's salt", "ask without")
            return
        what = f"of a prompt that it has just computed it reports {len(keys & holds)} blocks"
        yield wrong(at, what + f" of {len(keys)}", "see its log for lost cache events")
        return
    until = time.monotonic() + ARRIVES_S
    while not keys <= (known := _index(client, at)) and time.monotonic() < until:
        time.sleep(0.05)
    if keys <= known:
        yield ok(at, f"its {len(keys)} blocks of the probe are in the router's index")
    else:
        what = f"of {len(keys)} blocks that it reports the router knows {len(keys & known)}"
        yield wrong(at, what, "see `problem` and `recoveries` in /admin/replicas")


def _index(client: Client, at: str) -> set[int]:
    answer = client.get(f"/admin/index/{at}")
    return {int(key, 16) for key in answer.body["keys"]} if answer.status == 200 else set()


def _recoveries(client: Client) -> list[Any]:
    answer = client.get("/admin/replicas")
    return [each["recoveries"] for each in answer.body["replicas"]] if answer.status == 200 else []
