"""The OpenAI surface on its real server, with the real client: answers and streams."""

import json
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from api_site import BODY, HELLO, WORDS, Fleet, Site, WordRoute, curl, running
from prometheus_client import Counter

from hotbranch.v1 import serve_pb2 as pb
from router.generation import Prompt, Unavailable


@pytest_asyncio.fixture
async def site(smollm2: Path) -> AsyncIterator[Site]:
    async with running(smollm2) as site:
        yield site


# Answers in one piece


async def test_chat_answers_as_openai_does(site: Site) -> None:
    raw = await site.openai().chat.completions.with_raw_response.create(
        model="smol", messages=HELLO, max_tokens=3
    )
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == " one two three"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = len(site.fleet.opened[0][0].token_ids) // 4
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == prompt_tokens + 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert raw.headers["x-hotbranch-replica"] == "replica-1"
    assert raw.headers["x-hotbranch-predicted-tokens"] == "32"
    assert raw.headers["x-hotbranch-cached-tokens"] == "16"
    assert site.notes.routed_calls == [("replica-1", prompt_tokens, 32, 16)]
    assert (site.notes.tokens, site.notes.statuses) == (3, [200])


@pytest.mark.parametrize(("cached", "shown"), [(0, "0"), (None, None)])
async def test_no_hit_and_not_known_differ(
    site: Site, cached: int | None, shown: str | None
) -> None:
    site.fleet.cached_tokens = cached
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert answer.headers.get("x-hotbranch-cached-tokens") == shown


async def test_choices_are_counted_apart_and_the_prompt_once(site: Site) -> None:
    answer = await site.openai().chat.completions.create(
        model="smol", messages=HELLO, max_tokens=2, n=3, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {" one two"}
    prompt, samplings = site.fleet.opened[0]
    assert [sampling.seed for sampling in samplings] == [7, 8, 9]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt.token_ids) // 4
    assert answer.usage.completion_tokens == 6


async def test_every_parameter_reaches_the_engine(site: Site) -> None:
    await site.openai().chat.completions.create(
        model="smol",
        messages=HELLO,
        max_completion_tokens=4,
        temperature=0.25,
        top_p=0.5,
        frequency_penalty=1,
        presence_penalty=-1,
        stop=["a", "b"],
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=2,
        seed=-1,
        user="somebody",
        extra_body={
            "top_k": 40,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -2,
            "an_unknown_field": {"x": 1},
        },
    )
    prompt, (sampling,) = site.fleet.opened[0]
    assert prompt.priority == -2
    assert sampling == pb.Sampling(
        max_tokens=4,
        temperature=0.25,
        top_p=0.5,
        top_k=40,
        min_p=0.125,
        seed=(1 << 64) - 1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        logprobs=2,
        logit_bias={7: -100},
        min_tokens=2,
        include_stop=True,
        special_tokens=True,
    )


async def test_without_parameters_openais_defaults_hold(site: Site) -> None:
    async with site.http() as http:
        body = {"model": "smol", "messages": HELLO, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body):
            pass
        await http.post("/v1/completions", json={"model": "smol", "prompt": "hi"})
    (prompt, (chat,)), (_, (completion,)) = site.fleet.opened
    assert (chat.temperature, chat.top_p, chat.top_k) == (1.0, 1.0, 0)
    assert chat.max_tokens == site.model.max_context - len(prompt.token_ids) // 4
    assert not chat.HasField("seed")
    assert not chat.HasField("logprobs")
    assert completion.max_tokens == 16


async def test_chat_logprobs(site: Site) -> None:
    answer = await site.openai().chat.completions.create(
        model="smol", messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (token,) = logprobs.content
    spelled = site.model.renderer.tokenizer.token_bytes(280)
    assert token.bytes == list(spelled)
    assert token.token.encode() == spelled
    assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.5]


async def test_completion_logprobs_are_in_the_old_format(site: Site) -> None:
    answer = await site.openai().completions.create(
        model="smol", prompt="x", max_tokens=2, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    token = site.model.renderer.tokenizer.token_bytes(280).decode()
    assert logprobs.tokens == [token, token]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{token: -0.5}, {token: -0.5}]
    assert logprobs.text_offset == [0, len(token)]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a text", 1), ([1, 2, 3], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2)],
)
async def test_completions_take_every_form_of_prompt(site: Site, prompt: Any, count: int) -> None:
    answer = await site.openai().completions.create(model="smol", prompt=prompt, max_tokens=2, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert {choice.text for choice in answer.choices} == {" one two"}
    assert answer.usage is not None
    sent = [opened.token_ids for opened, _ in site.fleet.opened]
    assert answer.usage.prompt_tokens == sum(map(len, sent)) // 4
    assert answer.usage.completion_tokens == 4 * count
    if isinstance(prompt[0], int):
        assert sent == [array("I", prompt).tobytes()]


async def test_several_prompts_stream_under_their_own_index(site: Site) -> None:
    texts = ["", "", "", ""]
    stream = await site.openai().completions.create(
        model="smol", prompt=["a", "b"], max_tokens=3, n=2, stream=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [" one two three"] * 4


async def test_when_one_prompt_cannot_be_placed_none_stays(site: Site) -> None:
    async def open_second_only(prompt: Prompt, samplings: Sequence[pb.Sampling]) -> WordRoute:
        if len(site.fleet.routes) == 1:
            raise Unavailable("gone")
        return await Fleet.open(site.fleet, prompt, samplings)

    site.fleet.open = open_second_only  # type: ignore[method-assign]
    async with site.http() as http:
        answer = await http.post("/v1/completions", json={"model": "smol", "prompt": ["a", "b"]})
    assert answer.status_code == 503
    assert site.fleet.routes[0].cancelled


async def test_echo_repeats_the_prompt(site: Site) -> None:
    ids = [81, 82]
    answer = await site.openai().completions.create(
        model="smol", prompt=ids, echo=True, max_tokens=1
    )
    assert answer.choices[0].text == site.model.renderer.tokenizer.decode(ids) + " one"
    text = ""
    async for chunk in await site.openai().completions.create(
        model="smol", prompt="hey", echo=True, max_tokens=1, stream=True
    ):
        text += "".join(choice.text for choice in chunk.choices)
    assert text == "hey one"


# Streams


async def test_a_stream_is_openais_byte_for_byte(site: Site) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    raw = await curl(
        f"{site.url}/v1/chat/completions", "-i", "-d", json.dumps(body), "-H", "x-request-id: r-1"
    )
    head, _, stream = raw.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head
    assert b"x-request-id: r-1" in head
    assert b"x-hotbranch-replica: replica-1" in head
    assert b"x-hotbranch-cached-tokens: 16" in head
    events = stream.split(b"\n\n")
    assert events[-1] == b""
    assert events[-2] == b"data: [DONE]"
    assert all(event.startswith(b"data: ") for event in events[:-1])
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-r-1", "chat.completion.chunk", "smol")
    }
    *parts, last = chunks
    assert [part["usage"] for part in parts] == [None] * len(parts)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["choices"][0]["delta"] for part in parts[1:]] == [
        {"content": " one"},
        {"content": " two"},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_the_openai_client_reads_a_stream(site: Site) -> None:
    texts, usages = {0: "", 1: ""}, []
    stream = await site.openai().chat.completions.create(
        model="smol",
        messages=HELLO,
        n=2,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys((0, 1), " one two three four one")
    assert [usage is None for usage in usages] == [True] * (len(usages) - 1) + [False]
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 10


async def test_without_include_usage_no_chunk_speaks_of_it(site: Site) -> None:
    raw = await curl(f"{site.url}/v1/chat/completions", "-d", json.dumps({**BODY, "stream": True}))
    assert b'"usage"' not in raw
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_a_failure_after_the_first_token_is_an_event(site: Site) -> None:
    site.fleet.fail_after = 1
    raw = await curl(f"{site.url}/v1/chat/completions", "-d", json.dumps({**BODY, "stream": True}))
    last = raw.rstrip(b"\n").split(b"\n\n")[-1]
    assert json.loads(last[6:])["error"]["message"] == "replica lost"
    assert b"[DONE]" not in raw
    assert b" one" in raw
    stream = await site.openai().chat.completions.create(
        model="smol", messages=HELLO, max_tokens=3, stream=True
    )
    with pytest.raises(openai.APIError, match="replica lost"):
        async for _ in stream:
            pass
    assert site.notes.statuses == [503, 503]


async def test_the_same_failure_in_one_piece_is_a_503(site: Site) -> None:
    site.fleet.fail_after = 1
    async with site.http() as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert site.fleet.routes[0].cancelled


async def test_text_that_lags_behind_its_token_makes_no_chunk(site: Site) -> None:
    site.fleet.token = 280
    WORDS[1] = ""
    try:
        body = json.dumps({**BODY, "stream": True})
        raw = await curl(f"{site.url}/v1/chat/completions", "-d", body)
    finally:
        WORDS[1] = " two"
    contents = [
        json.loads(event[6:])["choices"][0]["delta"].get("content")
        for event in raw.split(b"\n\n")[:-2]
    ]
    assert contents == ["", " one", " three"]


# Tokens, models and the rest


async def test_tokenize_and_detokenize(site: Site) -> None:
    async with site.http() as http:
        told = (await http.post("/tokenize", json={"model": "smol", "prompt": "héllo"})).json()
        assert told["count"] == len(told["tokens"]) > 0
        assert told["max_model_len"] == site.model.max_context
        back = await http.post("/detokenize", json={"model": "smol", "tokens": told["tokens"]})
        assert back.json() == {"prompt": "héllo"}
        chat = (await http.post("/tokenize", json={"messages": HELLO})).json()
        await http.post("/v1/chat/completions", json=BODY)
        spelled = await http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True})
    sent = site.fleet.opened[0][0].token_ids
    assert array("I", chat["tokens"]).tobytes() == sent
    assert "".join(spelled.json()["token_strs"]) == "a b"


async def test_models(site: Site) -> None:
    client = site.openai()
    assert [model.id async for model in client.models.list()] == ["smol", "tuned"]
    model, adapter = [await client.models.retrieve(name) for name in ("smol", "tuned")]
    assert model.owned_by == adapter.owned_by == "hotbranch"
    assert (model.to_dict()["parent"], adapter.to_dict()["parent"]) == (None, "smol")
    assert (model.to_dict()["root"], adapter.to_dict()["root"]) == ("smol", "tuned")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("some/other")


async def test_health_ready_version_metrics(site: Site) -> None:
    Counter("things", "of this test", registry=site.registry).inc(3)
    async with site.http() as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).json() == {"status": "ready", "models": ["smol"]}
        assert set((await http.get("/version")).json()) == {"version"}
        assert "things_total 3.0" in (await http.get("/metrics")).text
        site.ready.clear()
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert (await http.head("/health")).status_code == 200


async def test_request_ids_come_back_or_are_made(site: Site) -> None:
    async with site.http() as http:
        for path in ("/health", "/nowhere"):
            answer = await http.get(path, headers={"x-request-id": "abc.1"})
            assert answer.headers["x-request-id"] == "abc.1"
        made = [
            (await http.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
            for bad in ("x" * 129, "with space", "")
        ]
    assert len(set(made)) == 3
    assert all(len(id) == 32 for id in made)


async def test_unknown_paths_and_methods(site: Site) -> None:
    async with site.http() as http:
        lost = await http.get("/v2/chat")
        wrong = await http.get("/v1/chat/completions")
        posted = await http.post("/health")
    assert lost.status_code == 404
    assert lost.json()["error"]["code"] == "not_found"
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert posted.headers["allow"] == "GET, HEAD"
    assert site.notes.answers == [
        ("unknown", 404),
        ("/v1/chat/completions", 405),
        ("/health", 405),
    ]
