"""What one rank has on its GPU, and below it."""

from collections.abc import Sequence

from router.fleet.holder import Holder
from router.index.index import Index

TieredRun = tuple[int, int | None, Sequence[int]]
"""The contract's tier, the key of the block before the run (None at a root), and the run."""


class Tiers:
    """Tells the index of a rank, which is one holder for its GPU and one more for each lower tier
    that it has had something in. Pure.

    What lies in a tier is there for whoever asks down to it or a lower one: each of these holders
    gets it, so that a block is there until the last tier has evicted it. Only where a tier evicts
    what it never had, too little is believed of the lower ones until the next snapshot.
    """

    def __init__(self, index: Index, holder: Holder) -> None:
        self._index = index
        self._holders = [holder]  # the GPU first
        self._block_size = 0

    def add(self, block_size: int, capacity: int) -> None:
        """The rank is there, and holds nothing yet, as in `Index.add`."""
        self.remove()
        self._block_size = block_size
        self._index.add(self._holders[0], block_size, capacity)

    def remove(self) -> None:
        """Forget the rank and all that it held. Idempotent."""
        for holder in self._holders:
            self._index.remove(holder)
        del self._holders[1:]

    def clear(self) -> None:
        """It holds nothing, nor will it hold what was predicted."""
        for holder in self._holders:
            self._index.clear(holder)

    def replace(self, runs: Sequence[TieredRun], now: float) -> None:
        """It holds exactly these runs, whatever was reported before."""
        for tier in {tier for tier, _, _ in runs}:
            self._reach(tier)
        for holder in self._holders:
            there = ((parent, keys) for tier, parent, keys in runs if tier <= holder.tier)
            self._index.replace(holder, there, now)

    def store(self, tier: int, parent: int | None, keys: Sequence[int], now: float) -> None:
        """It reports a run of blocks in a tier."""
        self._reach(tier)
        for holder in self._having(tier):
            self._index.store(holder, parent, keys, now)

    def evict(self, tier: int, keys: Sequence[int]) -> None:
        """It reports that blocks are gone from a tier."""
        for holder in self._having(tier):
            self._index.evict(holder, keys)

    def _having(self, tier: int) -> list[Holder]:
        return (
            [holder for holder in self._holders if holder.tier >= tier] if tier else self._holders
        )

    def _reach(self, tier: int) -> None:
        """Let there be a holder for a tier; it has what lies above."""
        if tier and all(holder.tier != tier for holder in self._holders):
            above = max(holder for holder in self._holders if holder.tier < tier)
            below = above._replace(tier=tier)
            self._index.add(below, self._block_size)
            self._index.inherit(below, above)
            self._holders.append(below)
