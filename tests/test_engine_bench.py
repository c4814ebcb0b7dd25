"""The loads of `bench engine` are what they claim to be, and its arithmetic is right."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench.engine_h100 import decode_rate, prefill_rate, step_seconds
from bench.engine_workloads import (
    CHAT,
    RAG,
    UNIQUE,
    VOICE,
    Load,
    Shape,
    chat,
    context,
    grouped,
    permuted,
    prompts,
)
from bench.engines.closed_loop import Ask, ClosedLoop, Turn
from bench.engines.radix import RadixSide
from bench.engines.random_llama import random_runner
from hotbranch.settings import EngineSettings
from replicas.radix.config import parse_config

SMALL = Shape(groups=3, requests=4, shared=(20, 12), own=(8, 4), reply=4)


def asked(load: Load) -> list[list[int]]:
    """The prompts of a load of single turns."""
    return [turn.added for [turn] in load.sessions]


def shared(a: list[int], b: list[int]) -> int:
    """Leading tokens that two prompts have in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


@pytest.mark.parametrize("make", [grouped, permuted])
def test_a_load_depends_on_its_seed_alone(make: Callable[[Shape, int, str], Load]) -> None:
    assert make(SMALL, 8, "a") == make(SMALL, 8, "a")
    assert make(SMALL, 8, "a") != make(SMALL, 8, "b")


def test_rag_has_the_reference_shape() -> None:
    load = grouped(RAG, 8, "rag")
    made = asked(load)
    assert len(made) == RAG.groups * RAG.requests
    assert {len(prompt) for prompt in made} == {1000 + 500 + 200 + 50}
    assert {turn.reply for [turn] in load.sessions} == {32}


@pytest.mark.parametrize("shape", [RAG, VOICE, SMALL])
def test_requests_share_the_prefix_of_their_group_and_nothing_else(shape: Shape) -> None:
    made = asked(grouped(shape, 8, "x"))
    for number, prompt in enumerate(made[: 2 * shape.groups]):
        for other in range(number):
            same = (number - other) % shape.groups == 0
            assert shared(prompt, made[other]) == (shape.prefix if same else 0)


def test_groups_take_turns() -> None:
    heads = [tuple(prompt[: SMALL.prefix]) for prompt in asked(grouped(SMALL, 8, "x"))]
    assert all(a != b for a, b in pairwise(heads))
    assert set(Counter(heads).values()) == {SMALL.requests}


def test_unique_prompts_share_no_block() -> None:
    made = asked(grouped(UNIQUE, 8, "x")) + asked(Load(prompts(4, 500, 1, "y"), 0, 1))
    assert len({tuple(prompt[:16]) for prompt in made}) == len(made)


def test_permuted_requests_hold_the_same_parts_in_other_orders() -> None:
    canonical, any_order = asked(grouped(SMALL, 8, "x")), asked(permuted(SMALL, 8, "x"))
    assert [sorted(prompt) for prompt in canonical] == [sorted(prompt) for prompt in any_order]
    moved = sum(a != b for a, b in zip(canonical, any_order, strict=True))
    assert moved > len(canonical) // 2


def test_a_pool_has_room_for_one_hot_set_and_not_for_two() -> None:
    for shape in (RAG, VOICE):
        room = shape.kv_tokens(8)
        # a prefix ends within a block, which every request then holds a copy of
        assert shape.prefix + 8 * (shape.suffix + shape.reply + 31) <= room
        assert room < 2 * shape.prefix + 8 * (shape.suffix + shape.reply) + 600


def test_scaling_shortens_the_texts_only() -> None:
    half = RAG.scaled(2)
    assert (half.groups, half.requests) == (RAG.groups, RAG.requests)
    assert (half.prefix, half.suffix, half.reply) == (750, 125, 16)


def test_chats_have_many_turns_and_long_tails() -> None:
    load = chat(replace(CHAT, sessions=400), 4096, 1, "x")
    turns = [len(session) for session in load.sessions]
    lengths = sorted(len(turn.added) for session in load.sessions for turn in session)
    assert 1 in turns and max(turns) == CHAT.most_turns
    assert 2.5 < sum(turns) / len(turns) < 4.0
    assert 50 < lengths[len(lengths) // 2] < 72
    assert lengths[-1] == CHAT.longest and lengths[0] >= 1
    assert context(load.sessions) <= CHAT.most_turns * 2 * CHAT.longest


def test_the_timing_model_gives_its_anchors() -> None:
    assert step_seconds(decoding=1) == pytest.approx(6.62e-3)
    assert step_seconds(decoding=128, context=133) == pytest.approx(9.92e-3, rel=1e-2)
    assert prefill_rate(1000) > prefill_rate(200) and decode_rate(8, 64) > decode_rate(8, 1000)


def test_a_closed_loop_keeps_so_many_in_flight_and_continues_conversations() -> None:
    talk = [Turn([1, 2], 2), Turn([3], 1)]
    loop = ClosedLoop([talk, [Turn([4], 1)], [Turn([5], 1)]], outstanding=2, first_id=7)
    assert loop.begin() == [Ask(7, [1, 2], 2), Ask(8, [4], 1)]
    assert loop.answered(7, [9, 9], 0) == Ask(9, [1, 2, 9, 9, 3], 1)
    assert loop.answered(9, [9], 4) == Ask(10, [5], 1)
    assert loop.answered(8, [9], 0) is None and not loop.done
    assert loop.answered(10, [9], 0) is None and loop.done
    assert loop.report(2.0) == {
        "requests": 4, "prompt": 9, "cached": 4, "generated": 5, "seconds": 2.0,
    }  # fmt: skip


def test_a_reply_of_another_length_is_an_error() -> None:
    loop = ClosedLoop([[Turn([1], 2)]], outstanding=1)
    loop.begin()
    with pytest.raises(ValueError, match="1 tokens instead of 2"):
        loop.answered(0, [9], 0)


@pytest.fixture(scope="module")
def side() -> Iterator[RadixSide]:
    """The engine under test over a tiny model with random weights."""
    torch.manual_seed(1)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_000,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    settings = EngineSettings(kv_tokens=2048, threads=1)
    made = RadixSide(random_runner(parse_config(raw, {}), settings), settings)
    yield made
    made.close()


def played(side: RadixSide, load: Load, **how: object) -> dict[str, float]:
    side.open(load.kv_tokens, 8, **how)  # type: ignore[arg-type]
    return side.run(load.sessions, load.outstanding)


def test_reuse_finds_the_prefixes_and_can_be_switched_off(side: RadixSide) -> None:
    load = grouped(replace(SMALL, shared=(64, 32)), 8, "x")
    tokens = SMALL.groups * SMALL.requests * (96 + SMALL.suffix)
    on, off = played(side, load), played(side, load, policy="fcfs", reuse=False)
    assert on["prompt"] == off["prompt"] == tokens
    assert off["cached"] == 0
    assert on["cached"] == SMALL.groups * (SMALL.requests - 1) * 96


def test_conversations_go_on_from_what_was_generated(side: RadixSide) -> None:
    session = [Turn(list(range(16, 48)), 33), Turn(list(range(50, 60)), 4)]
    side.open(2048, 8)
    report = side.run([session], 1)
    assert report["requests"] == 2
    assert report["cached"] == 64  # the first prompt and 32 of the tokens behind it


def test_the_clock_sees_the_tree_and_only_on_demand(side: RadixSide) -> None:
    load = grouped(SMALL, 8, "x")
    assert "tree_seconds" not in played(side, load)
    report = played(side, load, clock=True)
    assert 0.0 < report["tree_seconds"] < report["seconds"]


def test_products_of_a_plain_model_are_timed(side: RadixSide) -> None:
    assert side.products(16)["seconds"] > 0.0
