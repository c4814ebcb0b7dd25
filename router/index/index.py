"""The global radix tree: which replica holds which prefix, as far as this router knows.

Two layers. *Reported* blocks are what replicas said they hold. *Predicted* blocks are what was
dispatched a moment ago and will be reported soon. A holder's match is the deeper of the two.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.index.predictions import Predictions
from router.index.tree import Depths, PrefixTree


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks by holder, as found; nothing is spelled out for holders nobody asks about."""

    _bits: Mapping[str, int]
    _depths: Depths

    def depth(self, holder: str) -> int:
        """Blocks that a holder has; 0 for one that is unknown."""
        bit = self._bits.get(holder, 0)
        return max((depth for bits, depth in self._depths if bits & bit), default=0)


class Index:
    """Matches prompts against what every holder has. Pure: the caller gives the time in seconds."""

    def __init__(self) -> None:
        self._reported = PrefixTree()
        self._predicted = Predictions()
        self._bits: dict[str, int] = {}
        self._everybody = 0
        self._free: list[int] = []
        self._counts: dict[str, int] = {}

    def add(self, holder: str) -> None:
        """Make room for a holder; it holds nothing yet."""
        if holder not in self._bits:
            self._bits[holder] = self._free.pop() if self._free else 1 << len(self._bits)
            self._everybody |= self._bits[holder]
            self._counts[holder] = 0

    def remove(self, holder: str) -> None:
        """Forget a holder and all that it held."""
        if holder in self._bits:
            self.clear(holder)
            self._everybody ^= self._bits[holder]
            self._free.append(self._bits.pop(holder))
            del self._counts[holder]

    def clear(self, holder: str) -> None:
        """The holder holds nothing: neither reported nor predicted."""
        bit = self._bits[holder]
        self._reported.remove(bit)
        self._predicted.remove(bit)
        self._counts[holder] = 0

    def store(self, holder: str, parent: int, keys: Sequence[int]) -> None:
        """The holder reports a run of blocks below `parent`, a key or a root seed."""
        self._counts[holder] += self._reported.store(self._bits[holder], parent, keys)

    def evict(self, holder: str, keys: Sequence[int]) -> None:
        """The holder reports that blocks are gone, children before parents.

        What is below a block that is gone is gone too; unknown blocks are ignored.
        """
        self._counts[holder] -= self._reported.evict(self._bits[holder], keys)

    def replace(self, holder: str, runs: Iterable[tuple[int, Sequence[int]]]) -> None:
        """The holder holds exactly these (parent, keys) runs, whatever was reported before."""
        self._reported.remove(self._bits[holder])
        self._counts[holder] = 0
        for parent, keys in runs:
            self.store(holder, parent, keys)

    def predict(self, holder: str, parent: int, keys: Sequence[int], until: float) -> None:
        """The holder will soon hold this path from the root seed `parent` on.

        `until` never decreases from call to call.
        """
        self._predicted.add(self._bits[holder], parent, keys, until)

    def withdraw(self, holder: str, keys: Sequence[int]) -> None:
        """Take a prediction back, as of a request that never ran. Reported blocks stay."""
        if holder in self._bits:
            self._predicted.withdraw(self._bits[holder], keys)

    def expire(self, now: float) -> None:
        """Forget predictions whose life has ended."""
        self._predicted.expire(now)

    def match(self, keys: Sequence[int]) -> Match:
        """How much of a prompt each holder has, from the root on."""
        bits = self._everybody
        return Match(
            self._bits, self._reported.match(keys, bits) + self._predicted.match(keys, bits)
        )

    def held(self, holder: str) -> frozenset[int]:
        """Keys that the holder reported."""
        if holder not in self._bits:
            return frozenset()
        return frozenset().union(*self._reported.held(self._bits[holder]))

    def held_count(self, holder: str) -> int:
        """Blocks that the holder reported."""
        return self._counts.get(holder, 0)

    @property
    def blocks(self) -> int:
        """Distinct reported blocks."""
        return len(self._reported)

    @property
    def predicted_blocks(self) -> int:
        """Distinct predicted blocks."""
        return len(self._predicted)
