"""The prompts of the index benchmark; both sides make the same ones. Standard library only."""

import random
from array import array

BLOCK = 16  # tokens
GROUPS = 10
SHARED = 128  # blocks that a group shares
SEQUENCES = 1000
BLOCKS = 512
REPLICAS = 16


def sequences(count: int = SEQUENCES, blocks: int = BLOCKS) -> list["array[int]"]:
    """Token ids as uint32: each group shares its first quarter, the rest is a sequence's own."""
    shared = blocks * SHARED // BLOCKS
    heads = [_tokens(f"group {group}", shared) for group in range(GROUPS)]
    return [
        heads[i % GROUPS] + _tokens(f"own {i} of {blocks}", blocks - shared) for i in range(count)
    ]


def _tokens(seed: str, blocks: int) -> "array[int]":
    return array("I", random.Random(seed).randbytes(4 * BLOCK * blocks))


def percentile(times_s: list[float], share: float) -> float:
    """Microseconds."""
    return round(sorted(times_s)[min(len(times_s) - 1, int(len(times_s) * share))] * 1e6, 2)
