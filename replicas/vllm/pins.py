"""Prefixes that stay in vLLM's cache because they are used again in time. Pure.

vLLM has no pins: it evicts the block that was used longest ago. A request for a pinned prefix makes
its blocks the last to go, and costs one token of prefill.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotbranch.keys import TOKEN_BYTES
from replicas.engine import Namespace
from replicas.vllm.mirror import Mirror

SHARE = 4  # of the pool, the part that pins may hold
TURN = 3  # of the blocks that may be evicted, the part that is taken between two touches


@dataclass(slots=True, eq=False)
class Pin:
    """`tokens` are whole blocks; `seen` is `Mirror.stored` as of the last touch."""

    namespace: Namespace
    tokens: bytes
    keys: Sequence[int]
    until: float
    seen: int
    touching: bool = False


class Pins:
    """The pins of one rank. Times are seconds of the caller's clock."""

    def __init__(self, mirror: Mirror, blocks: int) -> None:
        self._mirror = mirror
        self._blocks = blocks
        self._pins: dict[tuple[Namespace, bytes], Pin] = {}  # by what was asked for

    def pin(self, namespace: Namespace, prompt: bytes, ttl_s: float, now: float) -> int | None:
        """Pin what is resident of a prompt; blocks pinned, None when there are too many pins."""
        self._expire(now)
        keys = self._mirror.keys(namespace, prompt)
        if not keys:
            return 0
        name = namespace, prompt
        others = (pin.keys for other, pin in self._pins.items() if other != name)
        if len(set(keys).union(*others)) > self._blocks // SHARE:
            return None
        tokens = prompt[: len(keys) * self._mirror.block_size * TOKEN_BYTES]
        self._pins[name] = Pin(namespace, tokens, keys, now + ttl_s, self._mirror.stored)
        return len(keys)

    def unpin(self, namespace: Namespace, prompt: bytes) -> int:
        pin = self._pins.pop((namespace, prompt), None)
        return len(pin.keys) if pin else 0

    def clear(self) -> None:
        self._pins.clear()

    def due(self, used_blocks: int, now: float) -> Iterator[Pin]:
        """Pins to touch now, before what was stored since their last touch pushes them out. Each is
        `touching` until `touched`."""
        self._expire(now)
        turn = (self._blocks - used_blocks) // TURN
        for pin in self._pins.values():
            if not pin.touching and self._mirror.stored - pin.seen >= turn:
                pin.touching, pin.seen = True, self._mirror.stored
                yield pin

    def touched(self, pin: Pin) -> None:
        pin.touching = False

    def _expire(self, now: float) -> None:
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            del self._pins[name]
