"""Remembered key chains give the keys that hashing gives."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hotbranch.keys import block_keys, root
from router.index.chains import SPANS, KeyChains

SEED = root("m")
LONG, SHORT = SPANS


def tokens(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(4 * count)


lengths = st.integers(0, 400) | st.integers(LONG - 10, 3 * LONG)


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), lengths, st.integers(0, 3), lengths),
        max_size=12,
    ),
    block_size=st.sampled_from((1, 2, 16)),
    limit=st.sampled_from((1, 5 * SHORT, 3 * LONG, 1 << 20)),
)
def test_keys_are_those_of_hashing(
    prompts: list[tuple[int, int, int, int]], block_size: int, limit: int
) -> None:
    chains = KeyChains(limit)
    for shared, head, own, tail in prompts:
        prompt = tokens(3 * LONG, shared)[: 4 * head] + tokens(3 * LONG, own + 10)[: 4 * tail]
        for seed in (SEED, root("other")):
            assert chains.keys(prompt, block_size, seed) == block_keys(prompt, block_size, seed)
        assert len(chains) <= limit


def test_a_known_prefix_costs_its_suffix() -> None:
    chains = KeyChains()
    prefix = tokens(16 * (2 * LONG + 3 * SHORT), 1)
    chains.keys(prefix + tokens(40, 2), 16, SEED)
    before = chains.hashed
    chains.keys(prefix + tokens(80, 3), 16, SEED)
    assert chains.hashed - before == 80 // 16


def test_what_is_used_stays_and_the_rest_is_forgotten() -> None:
    chains = KeyChains(limit=8 * SHORT)
    hot = tokens(SHORT * 16, 0)
    chains.keys(hot, 16, SEED)
    for other in range(1, 200):
        chains.keys(tokens(SHORT * 16, other), 16, SEED)
        before = chains.hashed
        chains.keys(hot, 16, SEED)
        assert chains.hashed == before
    assert len(chains) <= 8 * SHORT


def test_a_prompt_that_leaves_a_known_one_within_a_long_span_costs_its_own_part() -> None:
    chains = KeyChains()
    prefix = tokens(16 * (LONG + 5 * SHORT), 1)
    chains.keys(prefix + tokens(16 * LONG, 2), 16, SEED)
    before = chains.hashed
    chains.keys(prefix + tokens(16 * LONG, 3), 16, SEED)
    assert chains.hashed - before == LONG
