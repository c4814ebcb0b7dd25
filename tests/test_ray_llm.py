"""The request router for Ray Serve LLM, without Ray: what it reads, and how it places."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from ray_llm_app import ChatCompletionRequest

from deploy.ray_llm.placer import LEASE_S, REFUSED_S, Placer, Sent
from deploy.ray_llm.prompts import Prompt, Reader, Unread
from deploy.ray_llm.router import _load
from hotbranch.settings import RayLlmSettings
from router.prompt.render import Chat, Renderer
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

BLOCK = 16
SPEED = 1e-3  # seconds of prefill a token


# What it reads.


class Function(BaseModel):
    name: str
    parameters: dict[str, Any] = {}


class Tool(BaseModel):
    type: str = "function"
    function: Function


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def reader(smollm2: Path) -> Reader:
    return Reader.load(str(smollm2))


def read(reader: Reader, request: Any, adapter: str = "") -> Prompt:
    return reader.read([request, {"headers": "of the raw request"}], {}, adapter)


def test_a_chat_has_the_ids_that_the_model_is_given(smollm2: Path) -> None:
    template = "{{ tools | tojson }}{{ place }}{{ messages | tojson }}{{ add_generation_prompt }}"
    templates = {"default": ChatTemplate(template, {}, datetime.now)}
    renderer = Renderer(Tokenizer.load(smollm2), templates)
    messages = [user("What is the time?"), {"role": "assistant", "content": None}]
    tools, place = [Tool(function=Function(name="clock"))], {"place": "here"}
    request = ChatCompletionRequest(messages=messages, tools=tools, chat_template_kwargs=place)
    chat = Chat(messages, tools=[tools[0].model_dump()], template_kwargs=place)
    ids = renderer.chat(chat)
    assert b"clock" in renderer.tokenizer.decode(memoryview(ids).cast("I").tolist()).encode()
    prompt = read(Reader(renderer), request)
    assert prompt.ids == ids and prompt.tokens == len(ids) // 4 and not prompt.degraded
    other = {"messages": messages, "tools": tools, "chat_template_kwargs": {"place": "there"}}
    assert read(Reader(renderer), other).ids != ids


def test_wherever_the_request_is_among_the_arguments(reader: Reader) -> None:
    body = {"model": "m", "prompt": "The same text."}
    expected = read(reader, body)
    assert reader.read([], {"request": Anything(**body)}, "") == expected
    assert reader.read(["first", SimpleNamespace(**body)], {}, "") == expected


def test_several_prompts_count_together(reader: Reader) -> None:
    one, many = read(reader, {"prompt": "A text."}), read(reader, {"prompt": ["A text."] * 3})
    assert (many.ids, many.tokens) == (one.ids, 3 * one.tokens)
    assert read(reader, {"prompt": [5, 6, 7]}).ids == b"\5\0\0\0\6\0\0\0\7\0\0\0"
    assert read(reader, {"prompt": [[5, 6], [7]]}).tokens == 3


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (None, "no_prompt"),
        (17, "no_prompt"),
        ({"input": "to embed"}, "no_prompt"),
        ({"messages": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": {"text": "x"}}, "shape"),
        ({"prompt": [-1]}, "shape"),
        ({"prompt": [1, "x"]}, "shape"),
        ({"messages": "Hello"}, "shape"),
        ({"messages": [object()]}, "shape"),
        ({"messages": [user("x")], "tools": "hammer"}, "shape"),
        ({"messages": [user("x")], "chat_template_kwargs": 1}, "shape"),
        ({"messages": [user("\ud800"), {"role": 1}]}, "shape"),
    ],
)
def test_what_cannot_be_read_has_a_reason(reader: Reader, request_: Any, reason: str) -> None:
    with pytest.raises(Unread) as unread:
        read(reader, request_)
    assert unread.value.reason == reason


def test_nesting_without_end_is_refused(reader: Reader) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(Unread, match="shape"):
        read(reader, {"messages": [user(deep)]})


def test_what_the_replica_reads_is_left_to_it(reader: Reader) -> None:
    """vLLM's models hold iterators that can be gone through once."""
    calls = iter([{"type": "function"}])
    for message in ({**user("x"), "tool_calls": calls}, Anything(**user("x"), tool_calls=calls)):
        with pytest.raises(Unread, match="shape"):
            read(reader, {"messages": [message]})
    assert next(calls) == {"type": "function"}


def test_a_conversation_that_the_template_refuses_goes_by_its_text(reader: Reader) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    other = {"type": "image_url", "image_url": {"url": "data:" + "B" * 100_000}}
    text = {"type": "text", "text": "What is to be seen in this picture? " * 20}
    first = read(reader, {"messages": [user([text, picture])]})
    second = read(reader, {"messages": [user([text, other])]})
    assert first.degraded == second.degraded == "template"
    assert first.tokens < 300
    assert first.ids != second.ids
    assert first.ids[:600] == second.ids[:600]


def test_without_a_model_the_next_turn_begins_as_the_last_one() -> None:
    reader, messages = Reader(None), [user("Count. ¡Dale! " * 20)]
    first = read(reader, {"messages": messages})
    longer = [*messages, {"role": "assistant", "content": "One, two."}, user("Go on.")]
    second = read(reader, {"messages": longer})
    assert len(first.ids) % 4 == len(second.ids) % 4 == 0
    assert first.ids[:-8] == second.ids[: len(first.ids) - 8]


def test_namespaces_are_apart(reader: Reader) -> None:
    body = {"model": "m", "prompt": "The same text."}
    seeds = {
        read(reader, body).seed,
        read(reader, body | {"model": "n"}).seed,
        read(reader, body | {"cache_salt": "s"}).seed,
        read(reader, body, adapter="a").seed,
    }
    assert len(seeds) == 4


def test_a_model_that_cannot_be_used_leaves_texts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    for model in (str(tmp_path), "/nowhere"):
        assert read(_load(model), {"prompt": "abcd" * 3}).ids == b"abcd" * 3


# How it places.


def text(number: int, blocks: int, of: str = "shared") -> bytes:
    """Token ids that are nobody else's."""
    return Random(f"{of} {number}").randbytes(blocks * BLOCK * 4)


class World:
    """A placer and its clock. Requests are named by numbers."""

    def __init__(self, replicas: int, kv_tokens: int = 100_000) -> None:
        kwargs = {"kv_tokens": kv_tokens, "prefill_s_per_token": SPEED, "block_size": BLOCK}
        self.placer = Placer(RayLlmSettings(**kwargs))
        self.names = [f"r{number}" for number in range(replicas)]
        for name in self.names:
            self.placer.add(name)
        self.now = 100.0
        self.others: Mapping[str, int] = {}

    def rank(self, ids: bytes) -> list[str]:
        return self.decide(ids)[0]

    def decide(self, ids: bytes) -> tuple[list[str], str]:
        prompt = Prompt(ids, len(ids) // 4, 7) if ids else None
        ongoing = {name: self.others.get(name, 0) for name in self.names}
        job = self.placer.job(prompt, self.now)
        return self.placer.rank(job, ongoing, self.now)

    def send(self, ids: bytes, request: str = "x", name: str = "") -> Sent:
        """To where it is placed, or to a replica that Ray took instead; it is accepted there."""
        prompt = Prompt(ids, len(ids) // 4, 7) if ids else None
        name = name or self.rank(ids)[0]
        sent = self.placer.send(self.placer.job(prompt, self.now), name, request, self.now)
        self.placer.accepted(name, request)
        return sent

    def serve(self, ids: bytes) -> str:
        """A request from its beginning to its end."""
        sent = self.send(ids)
        self.now += 10.0
        self.placer.ended(sent.replica, "x", self.now)
        return sent.replica


def test_requests_that_share_stay_where_the_first_went() -> None:
    world = World(5)
    homes = defaultdict(set)
    for turn in range(6):
        for family in range(20):
            homes[family].add(world.serve(text(family, 20) + text(turn, 2, f"own {family}")))
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 5


def test_siblings_of_a_burst_follow_the_first_that_is_not_done() -> None:
    world = World(5)
    homes = {world.send(text(1, 100) + text(n, 1, "own"), str(n)).replica for n in range(10)}
    assert len(homes) == 1


@pytest.mark.parametrize("tokens", [3, 40, 3000])
def test_unrelated_requests_spread_as_evenly_as_in_turn(tokens: int) -> None:
    world = World(7)
    for number in range(70):
        world.send(text(number, 1 + tokens // BLOCK)[: tokens * 4], str(number))
    loads = world.placer.loads.values()
    assert max(loads) - min(loads) <= 1


def test_what_cannot_be_read_spreads_too() -> None:
    world = World(4)
    for number in range(40):
        world.send(b"", str(number))
    assert set(world.placer.loads.values()) == {10}
    world.others = {"r0": 50, "r1": 50, "r2": 11, "r3": 50}
    assert world.rank(b"")[0] == "r2"
    assert world.decide(b"")[1] == "load"


def test_short_prompts_have_no_home_in_common() -> None:
    world = World(4)
    homes = Counter(world.serve(text(number, 1)[:20]) for number in range(40))
    assert len(homes) == 4 and max(homes.values()) < 20


def test_a_hot_branch_overflows() -> None:
    world = World(3)
    homes = [
        world.send(text(1, 100) + text(number, 10, "own"), str(number)).replica
        for number in range(40)
    ]
    assert len(set(homes[:3])) == 1
    assert len(set(homes)) == 3


def test_the_second_best_is_who_computes_least() -> None:
    world = World(4)
    prompt = text(1, 60)
    world.send(prompt, "a", "r1")
    world.send(prompt[: len(prompt) // 2], "b", "r3")
    world.now += 10.0
    world.placer.ended("r1", "a", world.now)
    world.placer.ended("r3", "b", world.now)
    ranked, reason = world.decide(prompt + text(2, 2))
    assert (ranked[:2], reason) == (["r1", "r3"], "match")
    assert sorted(ranked) == world.names


def test_requests_of_other_routers_count() -> None:
    world = World(2)
    home = world.serve(text(1, 10))
    assert world.rank(text(1, 11))[0] == home
    world.others = {home: 200}
    assert world.rank(text(1, 11))[0] != home


def test_a_replica_that_died_has_nothing() -> None:
    world = World(3)
    prompt = text(1, 30)
    home = world.serve(prompt)
    sent = world.send(prompt)
    assert sent.replica == home
    world.placer.remove(home)
    world.placer.remove(home)
    assert not world.placer._index.blocks
    world.placer.ended(home, "x", world.now)
    world.names.remove(home)
    assert world.serve(prompt) != home
    world.placer.add(home)
    world.names.append(home)
    world.placer.take_back(sent, world.now)
    assert world.placer.loads[home] == 0
    assert world.rank(prompt)[0] != home


def test_a_refusal_leaves_no_trace_and_a_cancellation_the_cache() -> None:
    world = World(2)
    prompt = text(1, 30)
    home = world.rank(prompt)[0]
    job = world.placer.job(Prompt(prompt, 480, 7), world.now)
    world.placer.send(job, home, "refused", world.now)
    world.placer.ended(home, "refused", world.now + REFUSED_S / 2)
    assert set(world.placer.loads.values()) == {0}
    assert world.decide(prompt)[1] != "match"
    world.send(prompt, "cancelled", home)
    world.placer.ended(home, "cancelled", world.now + REFUSED_S / 2)
    assert set(world.placer.loads.values()) == {0}
    assert world.decide(prompt) == ([home, *world.rank(prompt)[1:]], "match")


def test_what_nobody_accepts_counts_for_a_while() -> None:
    """Ray may only be asked to pick one, or be cancelled between the choice and the sending."""
    world = World(2)
    world.placer.send(world.placer.job(None, world.now), "r0", "x", world.now)
    world.now += LEASE_S - 1
    world.rank(b"")
    assert world.placer.loads["r0"] == 1
    world.now += 2
    world.rank(b"")
    assert world.placer.loads["r0"] == 0
    assert not world.placer._open


def test_a_cache_holds_what_it_has_room_for() -> None:
    world = World(1, kv_tokens=100 * BLOCK)
    for number in range(5):
        world.serve(text(number, 30))
    old, new = (world.placer.job(Prompt(text(n, 30), 480, 7), world.now) for n in (0, 4))
    assert not world.placer._matched(old)
    assert [*world.placer._matched(new).values()] == [29]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_load_returns_to_nothing(data: st.DataObject) -> None:
    """Whatever happens to requests: also ids that are shared, refusals, deaths, late news."""
    world = World(3)
    sent: list[Sent] = []
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["send", "send", "take_back", "end", "die", "wait"]))
        if kind == "send":
            prompt = text(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4)))
            prompt = Prompt(prompt, len(prompt) // 4, 7) if prompt else None
            job = world.placer.job(prompt, world.now)
            name = world.placer.rank(job, dict.fromkeys(world.names, 0), world.now)[0][0]
            request = data.draw(st.sampled_from("ab"))
            sent.append(world.placer.send(job, name, request, world.now))
            if data.draw(st.booleans()):
                world.placer.accepted(name, request)
        elif kind == "die":
            name = data.draw(st.sampled_from(world.names))
            world.placer.remove(name)
            world.placer.add(name)
        elif kind == "wait":
            world.now += data.draw(st.sampled_from([0.01, 1.0, 10.0]))
        elif sent:
            one = data.draw(st.sampled_from(sent))
            if kind == "end":
                world.placer.ended(one.replica, one.request, world.now)
            else:
                world.placer.take_back(one, world.now)
    accepted = [one for one in sent if one.accepted]
    for one in accepted:
        world.placer.ended(one.replica, one.request, world.now)
    world.now += LEASE_S + 1
    world.rank(b"")
    placer = world.placer
    assert set(placer.loads.values()) == {0}
    assert not placer._open and not placer._leases
    for replica in placer._replicas.values():
        assert not replica.computing
        assert replica.server.outstanding.tokens == replica.server.memory.used == 0
