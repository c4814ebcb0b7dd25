"""Which replica a prompt goes to: the lowest estimated time to its first token.

The estimate is prefill work, in the replica's own measured seconds: what is queued there, plus what
of this prompt it does not hold, plus one step of the batch that is running. Load is tokens, never
request counts, and each candidate is judged on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from xxhash import xxh3_64_intdigest

from router.fleet.holder import Holder

# Measured costs of equal replicas differ by noise. Were the least one to win, it would win always,
# and fill one cache while the others stay empty.
TOLERANCE = 1.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that could take the prompt. Tokens, and seconds as it measured them."""

    holder: Holder
    matched: int  # tokens of the prompt it holds
    outstanding: int  # uncached prompt tokens it still has to prefill
    prefill_s_per_token: float
    step_s: float
    running: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `reason` is one of only, match, cost, rendezvous."""

    candidate: Candidate
    cost_s: float
    reason: str


def cost(candidate: Candidate, tokens: int) -> float:
    """Estimated seconds to the first token of a prompt of `tokens`."""
    prefill = candidate.outstanding + tokens - candidate.matched
    return prefill * candidate.prefill_s_per_token + (candidate.step_s if candidate.running else 0)


def place(tokens: int, discriminator: int, candidates: Sequence[Candidate]) -> Placement:
    """Choose among at least one candidate.

    The replica with the longest match wins while its cost exceeds the lowest by at most half of
    what its reuse saves. A prefix that all hold equally carries no affinity: then the first of two
    rendezvous candidates wins unless it is clearly the slower one. Rendezvous (Thaler and
    Ravishankar 1998) is by `discriminator`, a key that tells prompts of one family from others, so
    that new families spread evenly and each meets again before any report is there; the second
    candidate is the power of two choices (Mitzenmacher 2001).
    """
    if len(candidates) == 1:
        return Placement(candidates[0], cost(candidates[0], tokens), "only")
    least = min(candidate.matched for candidate in candidates)
    longest = max(candidate.matched for candidate in candidates)
    if longest == least:
        home, second = nsmallest(2, candidates, key=lambda c: _weight(c.holder, discriminator))
        slow = cost(home, tokens) > TOLERANCE * cost(second, tokens)
        chosen = second if slow else home
        return Placement(chosen, cost(chosen, tokens), "rendezvous")
    hottest = min(
        (candidate for candidate in candidates if candidate.matched == longest),
        key=lambda c: cost(c, tokens),
    )
    cheapest = min(candidates, key=lambda c: cost(c, tokens))
    saved = (hottest.matched - cheapest.matched) * hottest.prefill_s_per_token
    if cost(hottest, tokens) <= cost(cheapest, tokens) + saved / 2:
        return Placement(hottest, cost(hottest, tokens), "match")
    return Placement(cheapest, cost(cheapest, tokens), "cost")


def _weight(holder: Holder, discriminator: int) -> int:
    return xxh3_64_intdigest(f"{holder.replica}/{holder.rank}".encode(), discriminator)
