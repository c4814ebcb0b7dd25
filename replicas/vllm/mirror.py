"""What vLLM's cache holds, as its events tell it: where the order of admission looks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from hotbranch.keys import TOKEN_BYTES, block_keys, root
from hotbranch.tier import Tier
from replicas.engine import EvictedRun, Namespace, StoredRun

REMEMBERED = 256  # prompts whose keys are kept: about those that wait


@dataclass(slots=True, eq=False)
class Held:
    """A block on the device. vLLM keeps a copy for each of several that computed it at once."""

    serial: int
    copies: int = 1


class Mirror:
    """Implements `replicas.radix.waiting.Cache` over the blocks of one rank. Pure.

    A first token may come before the events of its step: what was computed for it counts as held
    until the second step after it is over.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0
        self.size = 0  # blocks held, copies included
        self.stored = self.evicted = 0  # blocks, since the start
        self._held: dict[int, Held] = {}  # by key
        self._computed: dict[int, Held] = {}  # not told yet, since this step
        self._before: dict[int, Held] = {}  # since the step before
        self._serial = count()

    def wipe(self) -> None:
        """All is gone at once."""
        self._held.clear()
        self._computed, self._before = {}, {}
        self.version += 1
        self.evicted += self.size
        self.size = 0

    def computed(self, namespace: Namespace, tokens: bytes) -> None:
        """A prompt has its first token; events will tell of its blocks."""
        for key in _keys(tokens, self.block_size, namespace):
            if key not in self._held:
                self._computed[key] = Held(next(self._serial))
        self.version += 1

    def stepped(self) -> None:
        """A step is over."""
        if self._computed or self._before:
            self._computed, self._before = {}, self._computed
            self.version += 1

    def store(self, runs: Iterable[StoredRun]) -> None:
        for run in runs:
            if run.tier != Tier.GPU:
                continue
            self.version += 1
            self.stored += len(run.keys)
            self.size += len(run.keys)
            for key in run.keys:
                self._computed.pop(key, None)
                self._before.pop(key, None)
                if (held := self._held.get(key)) is not None:
                    held.copies += 1
                else:
                    self._held[key] = Held(next(self._serial))

    def evict(self, runs: Iterable[EvictedRun]) -> None:
        for run in runs:
            if run.tier != Tier.GPU:
                continue
            self.version += 1
            self.evicted += len(run.keys)
            self.size -= len(run.keys)
            for key in run.keys:
                held = self._held[key]
                held.copies -= 1
                if not held.copies:
                    del self._held[key]

    def keys(self, namespace: Namespace, tokens: bytes) -> Sequence[int]:
        """Of the leading whole blocks of `tokens` that are held."""
        held = len(self.path(namespace, tokens, len(tokens) // TOKEN_BYTES))
        return _keys(tokens, self.block_size, namespace)[:held]

    def resident(self, namespace: Namespace, tokens: bytes, limit: int) -> int:
        return len(self.path(namespace, tokens, limit)) * self.block_size

    def path(self, namespace: Namespace, tokens: bytes, limit: int) -> Sequence[Held]:
        path = []
        for key in _keys(tokens, self.block_size, namespace)[: limit // self.block_size]:
            held = self._held.get(key) or self._computed.get(key) or self._before.get(key)
            if held is None:
                break
            path.append(held)
        return path


@lru_cache(REMEMBERED)
def _keys(tokens: bytes, block_size: int, namespace: Namespace) -> Sequence[int]:
    seed = root(namespace.model, namespace.adapter, namespace.salt)
    return block_keys(tokens, block_size, seed)
