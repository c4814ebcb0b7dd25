"""The global radix tree: which replica holds which prefix, as far as this router knows.

Two layers. *Reported* blocks are what replicas said they hold; of a replica that says nothing, what
its history tells. *Predicted* blocks are what was dispatched a moment ago and will be reported
soon. A holder's match is the deeper of the two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from router.fleet.holder import Holder
from router.index.branches import Branch, hottest
from router.index.history import History
from router.index.orphans import Orphans
from router.index.predictions import Predictions
from router.index.tree import Depths, PrefixTree, Run, positions

PREDICTION_S = 30.0
PREDICTED_SHARE = 16  # one part in so many of the limit is left to predictions
COMPUTED_S = 2.0  # after a prompt was computed, its report is here or will not come


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks by holder, as found; nothing is spelled out for those that have none."""

    _names: Sequence[Holder]  # by position of their bit
    _depths: Depths

    def depths(self) -> dict[Holder, int]:
        """The holders that have some of the path, and how many blocks."""
        names, found = self._names, {}
        for bits, depth in sorted(self._depths, key=itemgetter(1)):
            if depth:
                for position in positions(bits):
                    found[names[position]] = depth
        return found

    def depth(self, holder: Holder) -> int:
        """Blocks that one holder has; 0 for one that is unknown."""
        return self.depths().get(holder, 0)


class Index:
    """Matches prompts against what every holder has. Pure: the caller gives the time in seconds,
    which never goes back.

    Of each holder it knows a bag of blocks: one that is stored twice, as engines do that compute a
    block twice, is there until it has been evicted twice. A block counts while all before it are
    there. Beyond `limit` blocks it forgets: predictions first, then the coldest reported blocks,
    which `forgotten` counts.
    """

    def __init__(self, limit: float = inf, prediction_s: float = PREDICTION_S) -> None:
        self.forgotten = 0
        self._limit = limit
        self._prediction_s = prediction_s
        self._reported = PrefixTree()
        self._predicted = Predictions()
        self._history = History(self._reported)
        self._bits: dict[Holder, int] = {}
        self._holders: dict[int, tuple[Holder, int]] = {}  # bit -> who, and its block size
        self._everybody = 0
        self._names: list[Holder] = []  # by position of their bit; a free one keeps its last name
        self._free: list[int] = []
        # by bit, only where there are any
        self._copies: dict[int, dict[int, int]] = {}  # key -> beyond the first one
        self._orphans: dict[int, Orphans] = {}

    def add(self, holder: Holder, block_size: int = 16, capacity: int = 0) -> None:
        """Make room for a holder with blocks of `block_size` tokens; it holds nothing yet.

        Until its first report (`replace`), what was sent to it stands for what it holds, as if it
        had room for `capacity` blocks; 0 when that is not known, and nothing does.
        """
        self.remove(holder)
        if self._free:
            bit = self._free.pop()
            self._names[bit.bit_length() - 1] = holder
        else:
            bit = 1 << len(self._names)
            self._names.append(holder)
        self._bits[holder] = bit
        self._holders[bit] = holder, block_size
        self._everybody |= bit
        if capacity:
            self._history.open(bit, capacity)

    def remove(self, holder: Holder) -> None:
        """Forget a holder and all that it held."""
        if holder in self._bits:
            self.clear(holder)
            bit = self._bits.pop(holder)
            self._history.close(bit)
            self._reported.leave(bit)
            del self._holders[bit]
            self._everybody ^= bit
            self._free.append(bit)

    def clear(self, holder: Holder) -> None:
        """The holder holds nothing, nor will it hold what was predicted."""
        bit = self._bits[holder]
        self._forget_reports(bit)
        self._predicted.remove(bit)
        self._history.clear(bit)

    def store(self, holder: Holder, parent: int | None, keys: Sequence[int], now: float) -> None:
        """The holder reports a run of blocks below `parent`, a key or None for a root.

        What comes to a lower tier was not served there: only the GPU's blocks are heat.
        """
        self._store(self._bits[holder], parent, keys, now, served=not holder.tier)
        self._bound()

    def evict(self, holder: Holder, keys: Sequence[int]) -> None:
        """The holder reports that blocks are gone; unknown ones are ignored.

        What is below a block that is gone no longer counts, until the block comes back.
        """
        bit = self._bits[holder]
        if bit in self._copies or bit in self._orphans:
            keys = [key for key in keys if not self._evict_spare(bit, key)]
        lost = self._reported.evict(bit, keys)
        listed: list[int] = []
        for _, run in lost:
            listed += reversed(run)
        if listed == keys:
            return  # children before parents, as it should be
        gone = set(keys)
        for parent, run in lost:
            for key in run:
                if key not in gone:
                    assert parent is not None, "it was below a block that is gone"
                    self._orphans.setdefault(bit, Orphans()).add(parent, key)
                parent = key
        self._bound()  # what others hold too is there twice now

    def replace(self, holder: Holder, runs: Iterable[Run], now: float) -> None:
        """The holder holds exactly these runs, whatever was reported before."""
        bit = self._bits[holder]
        heats = self._reported.heats(bit)
        self._history.close(bit)
        self._forget_reports(bit)
        for parent, keys in runs:
            self._store(bit, parent, keys, now, served=False)
        self._reported.reheat(bit, heats, now)
        self._bound()

    def inherit(self, holder: Holder, source: Holder) -> None:
        """A holder that holds nothing holds what another one reported, every copy of it."""
        bit, other = self._bits[holder], self._bits[source]
        self._reported.inherit(bit, other)
        if other in self._copies:
            self._copies[bit] = dict(self._copies[other])
        if other in self._orphans:
            self._orphans[bit] = self._orphans[other].copy()
            self._bound()

    def predict(self, holder: Holder, keys: Sequence[int], now: float) -> None:
        """A prompt was sent to the holder, which will soon hold the whole path."""
        bit = self._bits[holder]
        self._reported.serve(bit, keys, now)
        self._history.add(bit, keys, now)
        self._predicted.add(bit, keys, now + self._prediction_s)
        self._bound()

    def withdraw(self, holder: Holder, keys: Sequence[int]) -> None:
        """Take a prediction back, as of a prompt that never ran. Reported blocks stay."""
        if holder in self._bits:
            self._predicted.withdraw(self._bits[holder], keys)
            self._history.withdraw(self._bits[holder], keys)

    def computed(self, holder: Holder, keys: Sequence[int], have: int, now: float) -> None:
        """A prompt that found `have` of its blocks has its first token: its report is on the way,
        and tells the truth from now on.
        """
        bit = self._bits.get(holder)
        if bit is None:
            return
        self._predicted.computed(bit, keys, now + COMPUTED_S)
        self._history.computed(bit, keys)
        if self.forgotten:  # the holder has them still, and will not report them again
            self._reported.store(bit, None, keys[:have], now, served=True)
            self._bound()

    def missed(self, holder: Holder, keys: Sequence[int], have: int, now: float) -> None:
        """A prompt found only `have` of its blocks: what was merely believed beyond them goes.

        The holder has computed them by now, which its report will say.
        """
        if holder in self._bits:
            self._predicted.missed(self._bits[holder], keys, have)
            self._history.missed(self._bits[holder], keys, have, now)
            self._bound()

    def expire(self, now: float) -> None:
        """Forget predictions whose life has ended."""
        self._predicted.expire(now)

    def match(self, keys: Sequence[int]) -> Match:
        """How much of a prompt each holder has, from the root on."""
        bits = self._everybody
        return Match(
            self._names, self._reported.match(keys, bits) + self._predicted.match(keys, bits)
        )

    def hottest(self, limit: int, now: float) -> list[Branch]:
        """The branches that serve most tokens a second, as a tree of up to `limit` of them."""
        return hottest(self._reported.root, limit, now, self._holders.__getitem__)

    def held(self, holder: Holder) -> frozenset[int]:
        """Keys that the holder reported, or holds as its history tells."""
        bit = self._bits.get(holder, 0)
        return frozenset(self._orphans.get(bit, ())).union(*self._reported.held(bit))

    def held_count(self, holder: Holder) -> int:
        """How many `held` has."""
        bit = self._bits.get(holder, 0)
        return self._reported.count(bit) + len(self._orphans.get(bit, ()))

    @property
    def blocks(self) -> int:
        """Distinct reported blocks, as far as they can be matched."""
        return len(self._reported)

    @property
    def predicted_blocks(self) -> int:
        """Distinct predicted blocks."""
        return len(self._predicted)

    def _forget_reports(self, bit: int) -> None:
        self._reported.remove(bit)
        self._copies.pop(bit, None)
        self._orphans.pop(bit, None)

    def _store(
        self, bit: int, parent: int | None, keys: Sequence[int], now: float, served: bool
    ) -> None:
        new = -1
        if bit not in self._orphans:
            new = self._reported.store(bit, parent, keys, now, served)
        if new < 0:
            self._store_among_orphans(bit, parent, keys, now, served)
        elif new < len(keys):
            self._copy(bit, keys[: len(keys) - new])

    def _store_among_orphans(
        self, bit: int, parent: int | None, keys: Sequence[int], now: float, served: bool
    ) -> None:
        """`store` for a holder with orphans: some of the blocks may be, or bring others back."""
        orphans = self._orphans.setdefault(bit, Orphans())
        start = 0
        for i, key in enumerate(keys):
            if key in orphans or orphans.below(key):
                self._store_beside(bit, parent, keys[start:i], now, served)
                parent = keys[i - 1] if i else parent
                self._store_beside(bit, parent, [key], now, served)
                parent, start = key, i + 1
        self._store_beside(bit, parent, keys[start:], now, served)
        if not orphans:
            del self._orphans[bit]

    def _store_beside(
        self, bit: int, parent: int | None, keys: Sequence[int], now: float, served: bool
    ) -> None:
        """Store a run that is no orphan, or one block that may be one."""
        if not keys:
            return
        orphans = self._orphans[bit]
        if keys[0] in orphans:
            self._copy(bit, keys)
            return
        new = self._reported.store(bit, parent, keys, now, served)
        if new >= 0:
            self._copy(bit, keys[: len(keys) - new])
            for below, orphan in orphans.adopt(keys[-1]):
                self._reported.store(bit, below, [orphan], now, served=False)
        else:
            for key in keys:
                assert parent is not None, "a root is always there"
                orphans.add(parent, key)
                parent = key

    def _copy(self, bit: int, keys: Sequence[int]) -> None:
        if not keys:
            return
        copies = self._copies.setdefault(bit, {})
        for key in keys:
            copies[key] = copies.get(key, 0) + 1

    def _evict_spare(self, bit: int, key: int) -> bool:
        """Evict a copy or an orphan, where a block is one."""
        copies, orphans = self._copies.get(bit), self._orphans.get(bit)
        if copies and key in copies:
            copies[key] -= 1
            if not copies[key]:
                del copies[key]
            if not copies:
                del self._copies[bit]
            return True
        if orphans and key in orphans:
            orphans.discard(key)
            if not orphans:
                del self._orphans[bit]
            return True
        return False

    def _bound(self) -> None:
        if self._limit == inf:
            return
        while (excess := self._total() - self._limit) > 0:
            # but for the freshest few, without which a burst would scatter while the index is full
            if len(self._predicted) > self._limit // PREDICTED_SHARE and self._predicted.shed():
                continue
            if self._orphans:
                self._forget_copies(*self._orphans.popitem())
            else:
                self._forget(int(len(self._reported) - excess))

    def _forget(self, limit: int) -> None:
        """Let the coldest reported blocks go, and what is known of them beside the tree."""
        before = len(self._reported)
        for bit, (above, keys) in self._reported.forget(limit):
            self._history.forgotten(bit, above, keys)
            self._forget_copies(bit, keys)
        self.forgotten += before - len(self._reported)

    def _forget_copies(self, bit: int, keys: Iterable[int]) -> None:
        if copies := self._copies.get(bit):
            for key in keys:
                copies.pop(key, None)
            if not copies:
                del self._copies[bit]

    def _total(self) -> int:
        orphans = sum(map(len, self._orphans.values())) if self._orphans else 0
        return len(self._reported) + len(self._predicted) + orphans
