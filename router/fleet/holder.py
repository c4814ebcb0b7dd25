"""Who has a cache of its own."""

from typing import NamedTuple


class Holder(NamedTuple):
    """A data-parallel rank of the replica at an address."""

    replica: str
    rank: int = 0
