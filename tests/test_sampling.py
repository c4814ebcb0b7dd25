"""Sampling against plain numpy references, and statistics under fixed seeds."""

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.engine import Namespace, Request, Sampling
from replicas.radix.sampling import Sampler, _invert
from replicas.radix.sequence import Sampled, Sequence

VOCAB = 50
DRAWS = 20_000


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, **p: Any
) -> Sequence:
    sampling = Sampling(**{"max_tokens": 8, **p})
    prompt = prompt or [0]
    tokens = array("I", prompt + (output or []))
    return Sequence(Request(0, Namespace("m"), b"", sampling), tokens, len(prompt), arrival=0.0)


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(values: Tensor, *sequences: Sequence) -> list[Sampled]:
    return Sampler().sample(values.clone(), sequences)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def reference(values: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution a row is drawn from, one token at a time."""
    probs = softmax(values / sampling.temperature)
    probs[probs < sampling.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    for token in order[sampling.top_k or len(order) :]:
        probs[token] = 0
    probs /= probs.sum()
    reached = 0.0
    for token in order:
        if reached >= sampling.top_p:
            probs[token] = 0
        reached += probs[token]
    return probs / probs.sum()


def draws(values: Tensor, drawn: Sequence, times: int) -> list[int]:
    """Tokens of one sequence drawn again and again from one row of logits, [1, vocab]."""
    return [s.token for s in Sampler().sample(values.repeat(times, 1), [drawn] * times)]


def frequencies(values: Tensor, **params: Any) -> np.ndarray:
    """Share of each token over DRAWS draws of one seeded sequence."""
    tokens = draws(values, sequence(seed=11, **params), DRAWS)
    return np.bincount(tokens, minlength=values.shape[1]) / DRAWS


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 3.0, "min_p": 0.05, "top_k": 30, "top_p": 0.8},
    ],
)
def test_draws_follow_the_reference_distribution(params: dict[str, Any]) -> None:
    values = logits(1, seed=5)
    expected = reference(values[0].double().numpy(), Sampling(max_tokens=1, **params))
    found = frequencies(values, **params)
    assert not found[expected == 0].any(), "a token outside the truncation was drawn"
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(found - expected) <= 4 * error + 1e-3).all()


@given(
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_no_token_outside_the_truncation_is_ever_drawn(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    values = logits(1, seed)
    # A hair wider than exact: float32 may round a token on the edge to either side.
    wider = Sampling(
        max_tokens=1, **{**params, "top_p": min(top_p + 1e-5, 1.0), "min_p": min_p * 0.9999}
    )
    allowed = reference(values[0].double().numpy(), wider) > 0
    assert allowed[draws(values, sequence(seed=seed, **params), 50)].all()


def test_greedy_takes_the_most_likely_and_a_tiny_temperature_is_greedy() -> None:
    values = logits(3)
    rows = [sequence(), sequence(temperature=1e-30, seed=1), sequence(top_k=3, top_p=0.1)]
    assert [s.token for s in sample(values, *rows)] == values.argmax(dim=-1).tolist()


def test_top_k_one_and_a_tiny_top_p_are_greedy_at_any_temperature() -> None:
    values = logits(2)
    rows = [sequence(temperature=50.0, top_k=1), sequence(temperature=1.0, top_p=1e-9)]
    assert [s.token for s in sample(values, *rows)] == values.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.3},
        {"frequency_penalty": -0.4, "presence_penalty": -0.2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {3: 2.5, 7: -100.0}},
        {"logit_bias": {4: 3.0, 9: -1.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    ],
)
def test_penalties_and_bias_change_logits_as_the_reference_does(params: dict[str, Any]) -> None:
    """The sampler works in place, so what it did to the logits can be read off."""
    prompt, output = [3, 3, 5, 9], [9, 9, 4, 11, 4, 9]
    expected = logits(1, seed=2)[0].double().numpy()
    for token, bias in params.get("logit_bias", {}).items():
        expected[token] += bias
    for token in set(prompt + output):
        factor = params.get("repetition_penalty", 1.0)
        expected[token] = (
            expected[token] / factor if expected[token] > 0 else expected[token] * factor
        )
    for token in set(output):
        expected[token] -= params.get("frequency_penalty", 0.0) * output.count(token)
        expected[token] -= params.get("presence_penalty", 0.0)
    values = logits(1, seed=2)
    (sampled,) = Sampler().sample(values, [sequence(prompt, output, **params)])
    np.testing.assert_allclose(values[0].numpy(), expected, atol=1e-5)
    assert sampled.token == int(expected.argmax())


def test_penalty_counts_follow_the_sequence_as_it_grows() -> None:
    """Step by step, and after a preemption that changes nothing, as if counted anew."""
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    grown, sampler = sequence([1, 2, 3], **params), Sampler()
    for step in range(12):
        values = logits(1, seed=7)
        (sampled,) = sampler.sample(values, [grown])
        anew = logits(1, seed=7)
        fresh = sequence([1, 2, 3], list(grown.tokens[3:]), **params)
        Sampler().sample(anew, [fresh])
        assert torch.equal(values, anew), f"step {step}"
        grown.tokens.append(sampled.token)
    assert len(set(grown.tokens[3:])) > 4, "the penalties never moved the choice"


def test_a_seed_fixes_the_tokens_whatever_else_is_in_the_batch() -> None:
    values = [logits(1, seed=step, vocab=VOCAB) for step in range(30)]

    def draw(params: dict[str, Any], neighbours: int) -> list[int]:
        sampler, drawn = Sampler(), sequence(seed=77, **params)
        cuts: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8}]
        others = [sequence(temperature=0.3 * i, seed=i, **cuts[i % 3]) for i in range(neighbours)]
        tokens = []
        for step, row in enumerate(values):
            batch = torch.cat([logits(neighbours, seed=step + 500), row])
            tokens.append(sampler.sample(batch, [*others, drawn])[-1].token)
        return tokens

    for params in ({"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9, "top_k": 40}):
        alone = draw(params, 0)
        assert alone == draw(params, 5) == draw(params, 9)
        assert len(set(alone)) > 5


def test_seeds_differ_and_no_seed_is_not_a_seed() -> None:
    def tokens(seed: int | None) -> list[int]:
        return draws(torch.zeros(1, VOCAB), sequence(temperature=1.0, seed=seed), 20)

    runs = [tokens(seed) for seed in (0, 1, 2, None, None)]
    assert len({tuple(run) for run in runs}) == 5
    assert tokens(2) == runs[2]


def test_forgetting_starts_the_random_state_over() -> None:
    values, drawn, sampler = torch.zeros(1, VOCAB), sequence(temperature=1.0, seed=3), Sampler()

    def next_tokens() -> list[int]:
        return [sampler.sample(values.clone(), [drawn])[0].token for _ in range(10)]

    first = next_tokens()
    assert next_tokens() != first
    sampler.forget(drawn)
    assert next_tokens() == first
    sampler.forget(sequence())


def test_logprobs_are_of_the_raw_logits_most_likely_first() -> None:
    values = logits(4, seed=9)
    rows = [
        sequence(logprobs=3),
        sequence(),
        sequence(logprobs=5, temperature=0.7, top_k=4, frequency_penalty=2.0, seed=1),
        sequence(logprobs=0, logit_bias={8: 100.0}),
    ]
    sampled = sample(values, *rows)
    assert sampled[1].logprobs is None
    for row, width in ((0, 3), (2, 5), (3, 0)):
        expected = np.log(softmax(values[row].double().numpy()))
        found = sampled[row].logprobs
        assert found is not None
        assert found.token == sampled[row].token
        assert found.logprob == pytest.approx(expected[found.token], abs=1e-5)
        assert [token for token, _ in found.top] == np.argsort(-expected)[:width].tolist()
        np.testing.assert_allclose(
            [p for _, p in found.top], np.sort(-expected)[:width] * -1, atol=1e-5
        )
    assert sampled[3].token == 8


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    (sampled,) = sample(logits(1, vocab=5), sequence(logprobs=20))
    assert sampled.logprobs is not None
    assert len(sampled.logprobs.top) == 5


def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary() -> None:
    broken = torch.full((3, VOCAB), float("nan"))
    rows = [sequence(), sequence(temperature=1.0), sequence(temperature=1.0, top_p=0.5)]
    assert all(0 <= sampled.token < VOCAB for sampled in sample(broken, *rows))


def test_a_share_of_zero_never_falls_on_a_weight_of_zero() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5]]).repeat(3, 1)
    assert _invert(weights, [0.0, 0.5, 0.9999]).tolist() == [[2], [4], [4]]


def test_nothing_ends_a_sequence_before_its_least_tokens() -> None:
    values = torch.arange(float(VOCAB))[None]  # the higher the likelier
    ends, stops = frozenset({VOCAB - 1, VOCAB - 3}), frozenset({VOCAB - 2})
    params = {"min_tokens": 2, "stop_token_ids": stops}
    for generated, expected in ((0, VOCAB - 4), (1, VOCAB - 4), (2, VOCAB - 1)):
        grown = sequence([0], [1] * generated, **params)
        (sampled,) = Sampler(ends).sample(values.clone(), [grown])
        assert sampled.token == expected
