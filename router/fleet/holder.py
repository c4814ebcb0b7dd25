"""Who has a cache of its own."""

from typing import NamedTuple


class Holder(NamedTuple):
    """A data-parallel rank of the replica at an address, and what it has on its GPU.

    With a lower `tier`, of the contract's, the same rank with all that it has in that tier and in
    those above it: what it can serve without computing it.
    """

    replica: str
    rank: int = 0
    tier: int = 0

    @property
    def server(self) -> "Holder":
        """What requests are sent to: the rank itself."""
        return Holder(self.replica, self.rank) if self.tier else self
