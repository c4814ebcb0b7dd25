"""What a step costs, told apart into decoding and prefill."""

from array import array

import pytest

from replicas.engine import Namespace, Request, Sampling
from replicas.radix.sequence import Chunk, Sequence, prefill_tokens
from replicas.step_cost import StepCost


def test_prefill_is_told_from_decode() -> None:
    cost = StepCost()
    assert (cost.step_s, cost.prefill_s_per_token) == (0.0, 0.0)
    cost.observe(2, 0.03)
    assert cost.prefill_s_per_token == 0.0, "a first short prompt tells of a step, not of tokens"
    for _ in range(50):
        cost.observe(0, 0.01)
        cost.observe(100, 0.21)
    assert cost.step_s == pytest.approx(0.01)
    assert cost.prefill_s_per_token == pytest.approx(0.002)
    for _ in range(50):
        cost.observe(10, 0.03)
    assert cost.prefill_s_per_token == pytest.approx(0.002), "a short suffix is not dearer"
    cost.observe(0, 0.02)
    assert 0.01 < cost.step_s < 0.02


def test_prefill_is_what_is_more_than_a_token() -> None:
    sequence = Sequence(Request(1, Namespace("m"), b"", Sampling(1)), array("I"), 0, 0.0)
    chunks = [Chunk(sequence, 5, 6), Chunk(sequence, 0, 100), Chunk(sequence, 3, 4)]
    assert prefill_tokens(chunks) == 100
    assert prefill_tokens(chunks[:1]) == 0
