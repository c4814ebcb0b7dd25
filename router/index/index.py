"""The global radix tree: which replica holds which prefix.

A block key names a whole path from the root (`hotbranch.keys`), so the tree needs no nodes: one
flat map from key to the set of holders is the same tree, and a lookup is a walk down the prompt's
keys. Holders are bits of an integer, so that one step of the walk serves every replica.

Two layers. *Reported* blocks are what replicas said they hold. *Predicted* blocks are what was
dispatched a moment ago and will be reported soon; they live for a short while, so that siblings in
a burst follow each other.
"""

from collections import deque
from collections.abc import Iterable, Sequence

_UNCLAIMED = (0.0, 0)


class Index:
    """Matches prompts against what every holder has. Pure: the caller gives the time in seconds."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}
        self._names: list[str | None] = []
        self._reported: dict[int, int] = {}
        self._predicted: dict[int, int] = {}
        self._held: dict[str, set[int]] = {}
        # holder -> predicted key -> (expiry, prompts that count on it)
        self._life: dict[str, dict[int, tuple[float, int]]] = {}
        self._expiries: deque[tuple[float, str, Sequence[int]]] = deque()

    def add(self, holder: str) -> None:
        """Make room for a holder; it holds nothing yet."""
        if holder in self._bit:
            return
        slot = self._names.index(None) if None in self._names else len(self._names)
        self._names[slot : slot + 1] = [holder]
        self._bit[holder] = 1 << slot
        self._held[holder] = set()
        self._life[holder] = {}

    def remove(self, holder: str) -> None:
        """Forget a holder and all that it held."""
        if holder not in self._bit:
            return
        self.clear(holder)
        bit = self._bit.pop(holder)
        self._names[bit.bit_length() - 1] = None
        del self._held[holder], self._life[holder]

    def clear(self, holder: str) -> None:
        """The holder holds nothing: neither reported nor predicted."""
        bit = self._bit[holder]
        _drop(self._reported, self._held[holder], bit)
        _drop(self._predicted, self._life[holder], bit)
        self._held[holder] = set()
        self._life[holder] = {}

    def store(self, holder: str, keys: Iterable[int]) -> None:
        """The holder reports blocks; predictions of them are confirmed."""
        bit = self._bit[holder]
        held, life, reported = self._held[holder], self._life[holder], self._reported
        for key in keys:
            held.add(key)
            reported[key] = reported.get(key, 0) | bit
            if life.pop(key, None) is not None:
                _drop(self._predicted, (key,), bit)

    def evict(self, holder: str, keys: Iterable[int]) -> None:
        """The holder reports that blocks are gone; unknown ones are ignored."""
        held = self._held[holder]
        gone = held.intersection(keys)
        held.difference_update(gone)
        _drop(self._reported, gone, self._bit[holder])

    def replace(self, holder: str, keys: Iterable[int]) -> None:
        """The holder holds exactly these blocks, whatever was reported before."""
        self.evict(holder, list(self._held[holder]))
        self.store(holder, keys)

    def predict(self, holder: str, keys: Sequence[int], expiry: float) -> None:
        """The holder will soon hold these blocks; `expiry` never decreases from call to call."""
        bit = self._bit[holder]
        held, life, predicted = self._held[holder], self._life[holder], self._predicted
        fresh = [key for key in keys if key not in held]
        for key in fresh:
            life[key] = expiry, life.get(key, _UNCLAIMED)[1] + 1
            predicted[key] = predicted.get(key, 0) | bit
        if fresh:
            self._expiries.append((expiry, holder, fresh))

    def withdraw(self, holder: str, keys: Sequence[int]) -> None:
        """Take back what was predicted for a prompt that never ran.

        Reported blocks stay, and so does what another prompt counts on.
        """
        life = self._life.get(holder)
        if life:
            gone = []
            for key in keys:
                expiry, claims = life.get(key, _UNCLAIMED)
                if claims > 1:
                    life[key] = expiry, claims - 1
                elif claims:
                    del life[key]
                    gone.append(key)
            _drop(self._predicted, gone, self._bit[holder])

    def expire(self, now: float) -> None:
        """Forget predictions whose life has ended."""
        while self._expiries and self._expiries[0][0] <= now:
            _, holder, keys = self._expiries.popleft()
            life = self._life.get(holder)
            if life:
                gone = [key for key in keys if key in life and life[key][0] <= now]
                for key in gone:
                    del life[key]
                _drop(self._predicted, gone, self._bit[holder])

    def match(self, keys: Sequence[int], among: Iterable[str]) -> dict[str, int]:
        """Blocks of the prompt that each holder in `among` has from the root on, without a hole."""
        bits = {self._bit[holder]: holder for holder in among if holder in self._bit}
        depth = dict.fromkeys(bits.values(), 0)
        alive = sum(bits)
        reported, predicted = self._reported, self._predicted
        for level, key in enumerate(keys):
            holders = alive & (reported.get(key, 0) | predicted.get(key, 0))
            lost = alive ^ holders
            while lost:
                bit = lost & -lost
                depth[bits[bit]] = level
                lost ^= bit
            alive = holders
            if not alive:
                return depth
        for bit, holder in bits.items():
            if alive & bit:
                depth[holder] = len(keys)
        return depth

    def held(self, holder: str) -> frozenset[int]:
        """Keys that the holder reported."""
        return frozenset(self._held.get(holder, ()))

    def held_count(self, holder: str) -> int:
        return len(self._held.get(holder, ()))

    @property
    def blocks(self) -> int:
        """Distinct reported blocks."""
        return len(self._reported)

    @property
    def predicted_blocks(self) -> int:
        """Distinct blocks that are predicted and not yet reported."""
        return len(self._predicted)


def _drop(masks: dict[int, int], keys: Iterable[int], bit: int) -> None:
    """Clear a holder's bit in each of `keys`, which all carry it."""
    for key in keys:
        rest = masks[key] & ~bit
        if rest:
            masks[key] = rest
        else:
            del masks[key]
