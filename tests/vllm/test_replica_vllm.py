"""One replica with real vLLM, over its contract."""

import asyncio
import itertools
import json
import os
import random
import re
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from fleet import BLOCK, BLOCKS, Replica, Router, stopping
from tokenizers import Tokenizer

from hotbranch.embedded import ensure
from hotbranch.settings import Common
from hotbranch.v1 import replica_pb2 as pb
from hotbranch.v1.cache_pb2 import Load, WatchRequest
from hotbranch.v1.replica_pb2_grpc import ReplicaStub
from hotbranch.v1.serve_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    ClientFrame,
    Delta,
    Rejection,
    Sampling,
    Structure,
    Submit,
)

PATIENCE_S = 240.0
tickets = itertools.count(1)


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    running = Replica(Path(f"/tmp/hb{os.getpid()}s"), tool_call_parser="hermes")
    with stopping(running):
        yield running.ready()


@pytest.fixture
async def stub(replica: Replica) -> AsyncIterator[ReplicaStub]:
    async with grpc.aio.insecure_channel(replica.address) as channel:
        yield ReplicaStub(channel)


@dataclass
class Reply:
    """All that came for one submission."""

    deltas: list[Delta] = field(default_factory=list)
    rejection: Rejection | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        data = b"".join(delta.token_ids for delta in self.deltas)
        return list(struct.unpack(f"<{len(data) // 4}I", data))

    @property
    def cached(self) -> int:
        assert self.deltas[0].HasField("cached_tokens")
        return self.deltas[0].cached_tokens

    @property
    def over(self) -> bool:
        return bool(self.rejection or (self.deltas and self.deltas[-1].finish))


def submission(tokens: Iterable[int], **changes: object) -> Submit:
    ids = [*tokens]
    submit = Submit(
        ticket=next(tickets), model="smollm2", token_ids=struct.pack(f"<{len(ids)}I", *ids)
    )
    submit.sampling.max_tokens = 4
    submit.MergeFrom(Submit(**changes))  # type: ignore[arg-type]
    return submit


async def ask(stub: ReplicaStub, *submits: Submit, cancel: Sequence[int] = ()) -> list[Reply]:
    """Submit all at once; their replies."""
    call = stub.Serve()
    replies = {submit.ticket: Reply() for submit in submits}
    await call.write(ClientFrame(submit=submits))
    async with asyncio.timeout(PATIENCE_S):
        while not all(reply.over for reply in replies.values()):
            frame = await call.read()
            assert frame is not grpc.aio.EOF
            for delta in frame.deltas:
                replies[delta.ticket].deltas.append(delta)
            for rejection in frame.rejections:
                replies[rejection.ticket].rejection = rejection
    call.cancel()
    return [replies[submit.ticket] for submit in submits]


def prompt(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(size)]


async def loads(stub: ReplicaStub) -> AsyncIterator[Load]:
    call = stub.WatchCache(WatchRequest(load_interval_s=0.02))
    async for update in call:
        if update.HasField("load"):
            yield update.load


async def loaded(stub: ReplicaStub, **figures: int) -> Load:
    """Wait for a report with these figures."""
    async with asyncio.timeout(20):
        async for load in loads(stub):
            if all(getattr(load, name) == value for name, value in figures.items()):
                return load
    raise AssertionError("unreachable")


async def test_it_says_what_it_is(stub: ReplicaStub) -> None:
    here = await stub.Describe(pb.DescribeRequest())
    assert (here.engine, here.block_size, here.max_context) == ("vllm", BLOCK, 4096)
    assert here.capacity_blocks == BLOCKS - 1, "vLLM keeps one empty"
    assert here.structures and here.parses and here.chunk_tokens == 512


async def test_prefixes_are_found_again_but_not_across_salts(stub: ReplicaStub) -> None:
    first = prompt(1, 100)
    (cold,) = await ask(stub, submission(first))
    assert cold.cached == 0
    assert len(cold.tokens) == 4 and cold.deltas[-1].finish == FINISH_REASON_LENGTH
    (warm,) = await ask(stub, submission(first))
    assert warm.cached == 96
    assert warm.tokens == cold.tokens
    (other,) = await ask(stub, submission(first, salt="a"))
    (again,) = await ask(stub, submission(first, salt="a"))
    assert (other.cached, again.cached) == (0, 96)


async def test_a_cancelled_request_leaves_nothing(stub: ReplicaStub) -> None:
    call = stub.Serve()
    submits = [submission(prompt(n, 300), sampling=Sampling(max_tokens=3000)) for n in range(12)]
    await call.write(ClientFrame(submit=submits))
    frame = await call.read()
    assert frame is not grpc.aio.EOF
    load = await loaded(stub, running=8)
    assert load.waiting == 4, "they wait in the replica"
    await call.write(ClientFrame(cancel=[submit.ticket for submit in submits[:11]]))
    await loaded(stub, running=1, waiting=0)
    call.cancel()  # a router that goes takes the last one along
    await loaded(stub, running=0, waiting=0, used_blocks=0, outstanding_tokens=0)


async def test_stop_strings_and_logprobs(stub: ReplicaStub) -> None:
    tokens = prompt(5, 40)
    (free,) = await ask(stub, submission(tokens, sampling=Sampling(max_tokens=12, logprobs=2)))
    logprobs = [entry for delta in free.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in logprobs] == free.tokens
    assert all(len(entry.top_ids) == 2 for entry in logprobs)
    assert all(entry.top_ids[0] == entry.token_id for entry in logprobs), "greedy is most likely"
    stop = free.text[3:6]
    (cut,) = await ask(stub, submission(tokens, sampling=Sampling(max_tokens=12, stop=[stop])))
    assert cut.deltas[-1].finish == FINISH_REASON_STOP
    assert cut.deltas[-1].stop_reason == stop
    assert cut.text == free.text[: free.text.index(stop)]


async def test_where_a_reply_may_end_and_what_is_shown(stub: ReplicaStub) -> None:
    tokens = prompt(5, 40)
    (free,) = await ask(stub, submission(tokens, sampling=Sampling(max_tokens=12)))
    stop = free.text[3:6]
    kept = Sampling(max_tokens=12, stop=[stop], include_stop=True)
    (cut,) = await ask(stub, submission(tokens, sampling=kept))
    assert cut.text == free.text[: free.text.index(stop) + len(stop)]
    end = free.tokens[2]
    soon = Sampling(max_tokens=12, stop_token_ids=[end])
    later = Sampling(max_tokens=12, stop_token_ids=[end], min_tokens=6)
    (early, late) = await ask(
        stub, submission(tokens, sampling=soon), submission(tokens, sampling=later)
    )
    assert early.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert end not in late.tokens[:6] and len(late.tokens) > 6
    special = {1: 100.0}  # <|im_start|>
    for shown in (False, True):
        sampling = Sampling(max_tokens=2, logit_bias=special, special_tokens=shown)
        (reply,) = await ask(stub, submission(tokens, sampling=sampling))
        assert reply.text == "<|im_start|>" * 2 * shown


@pytest.mark.timeout(300)
async def test_the_openai_client_gets_structures_and_calls(replica: Replica) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "level",
            "strict": True,  # else vLLM holds the arguments to no schema
            "parameters": {
                "type": "object",
                "properties": {"lock": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["lock"],
                "additionalProperties": False,
            },
        },
    }
    asked: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Which lock?"}],
        "max_tokens": 120,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    router = Router([replica.address])
    with stopping(router):
        url = f"{router.ready(1).url}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100)
        create = client.chat.completions.create
        answer = await create(**asked, extra_body={"guided_regex": "(upper|lower) lock [0-9]"})
        assert re.fullmatch("(upper|lower) lock [0-9]", answer.choices[0].message.content)
        answer = await create(**asked, tools=[tool], tool_choice="required", n=2)
        for choice in answer.choices:
            assert choice.finish_reason == "tool_calls"
            for one in choice.message.tool_calls:
                assert one.function.name == "level"
                assert json.loads(one.function.arguments)["lock"] in range(10)
        named = {"type": "function", "function": {"name": "level"}}
        name, arguments, finish = "", "", None
        async for chunk in await create(**asked, tools=[tool], tool_choice=named, stream=True):
            finish = chunk.choices[0].finish_reason
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += piece.function.name or ""
                arguments += piece.function.arguments
        assert (name, finish) == ("level", "stop")
        assert json.loads(arguments)["lock"] in range(10)
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**asked, extra_body={"guided_grammar": "root ::= ]["})
        assert "grammar" in refused.value.message.lower()


@pytest.mark.parametrize(
    ("structure", "matches"),
    [
        (Structure(regex="(ab|cd){3}!"), r"(ab|cd){3}!"),
        (Structure(choices=Structure.Choices(texts=["yes", "maybe"])), "yes|maybe"),
        (Structure(grammar='root ::= "x" [0-9] [0-9]'), "x[0-9][0-9]"),
    ],
)
async def test_a_reply_is_held_to_its_structure(
    stub: ReplicaStub, structure: Structure, matches: str
) -> None:
    sampling = Sampling(max_tokens=24, structure=structure)
    (reply,) = await ask(stub, submission(prompt(6, 20), sampling=sampling))
    assert reply.rejection is None
    assert re.fullmatch(matches, reply.text)


async def test_a_reply_follows_a_schema(stub: ReplicaStub) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    sampling = Sampling(max_tokens=60, structure=Structure(json_schema=json.dumps(schema)))
    text = 'Some JSON: {"n": 5}. Some more JSON:'  # else it may write white space for ever
    tokens = Tokenizer.from_file(str(ensure(Common().cache_dir) / "tokenizer.json")).encode(text)
    (reply,) = await ask(stub, submission(tokens.ids, sampling=sampling))
    assert json.loads(reply.text)["n"] in range(10)


async def test_a_structure_that_cannot_be_is_refused(stub: ReplicaStub) -> None:
    sampling = Sampling(max_tokens=4, structure=Structure(grammar="root ::= ]["))
    (reply,) = await ask(stub, submission(prompt(8, 20), sampling=sampling))
    assert reply.rejection is not None
    assert reply.rejection.reason == Rejection.REASON_INVALID
    assert "grammar" in reply.rejection.message.lower()


async def test_a_pinned_prefix_outlives_a_flood(stub: ReplicaStub) -> None:
    pinned, loose = prompt(9, 200), prompt(10, 200)
    await ask(stub, submission(pinned), submission(loose))
    data = struct.pack("<200I", *pinned)
    space = pb.Namespace(model="smollm2")
    reply = await stub.Pin(pb.PinRequest(namespace=space, token_ids=data, ttl_s=600))
    assert reply.pinned_blocks == 200 // BLOCK
    flood = [submission(prompt(100 + n, 500)) for n in range(2 * BLOCKS * BLOCK // 500)]
    await ask(stub, *flood)
    kept, lost = await ask(stub, submission(pinned), submission(loose))
    assert kept.cached == 192
    assert lost.cached == 0, "the flood took all that was not pinned"
    gone = await stub.Unpin(pb.UnpinRequest(namespace=space, token_ids=data))
    assert gone.unpinned_blocks == 200 // BLOCK


async def test_siblings_follow_each_other_into_vllm(stub: ReplicaStub) -> None:
    """Two of three families fit: each is served to its end before what it shares is evicted."""
    families = [prompt(20 + n, 2240) for n in range(3)]
    submits = [
        submission([*families[n % 3], *prompt(200 + n, 40)], sampling=Sampling(max_tokens=1))
        for n in range(12)
    ]
    replies = await ask(stub, *submits)
    hits = sum(reply.cached > 2200 for reply in replies)
    assert hits >= 7, "of 9, where each family is computed once; in order of arrival it would be 0"


async def test_tools_that_are_required_are_called(stub: ReplicaStub) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "level",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"lock": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["lock"],
                "additionalProperties": False,
            },
        },
    }
    chat = json.dumps({"tools": [tool], "tool_choice": "required"})
    sampling = Sampling(max_tokens=120)
    (reply,) = await ask(stub, submission(prompt(30, 20), sampling=sampling, chat=chat))
    assert reply.rejection is None, reply.rejection
    calls = [call for delta in reply.deltas for call in delta.tool_calls]
    assert calls and calls[0].name == "level"
    first = "".join(call.arguments for call in calls if call.index == 0)
    assert json.loads(first)["lock"] in range(1, 10)
    assert not reply.text.strip()
