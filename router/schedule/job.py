"""A prompt as the scheduler sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Sizes in tokens, times in seconds of the scheduler's clock. Lower `priority` goes first."""

    id: int
    tokens: int
    keys: Mapping[int, Sequence[int]]  # the prompt's block keys, by block size
    arrived: float
    tenant: str = ""
    priority: int = 0
    deadline: float = inf  # of its first token
    seed: int = 0  # of its namespace
    session: str = ""  # as its client names it
    avoids: frozenset[str] = frozenset()  # replicas that it has been to
    needs: frozenset[str] = frozenset()  # that its server has to offer
