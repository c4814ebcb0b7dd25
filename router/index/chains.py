"""Block keys of prompts, remembered: a prefix that was seen before is not hashed block by block.

Spans of blocks are looked up by one hash over all their bytes, seeded with the key before them, so
a repeated prefix costs a pass of the hash and a lookup a span. Spans are long where a prompt is; a
new one is made of shorter ones, which may be known.
"""

from xxhash import xxh3_64_intdigest

from hotbranch.keys import TOKEN_BYTES, block_keys

SPANS = (1024, 64)  # blocks


class KeyChains:
    """Remembers the keys of spans that were used recently, up to `limit` blocks of them.

    `hashed` counts the blocks that had to be hashed one by one. Like a key, the name of a span can
    collide with another; the prompt is then only placed badly.
    """

    def __init__(self, limit: int = 1 << 21) -> None:
        self.hashed = 0
        self._half = limit // 2
        # Two generations instead of a linked list: what is used again moves to the young one, and
        # the old one goes when the young one is full.
        self._young: dict[int, list[int]] = {}
        self._old: dict[int, list[int]] = {}
        self._new = 0  # blocks of the young one

    def keys(self, token_ids: bytes, block_size: int, parent: int) -> list[int]:
        """The same as `hotbranch.keys.block_keys`."""
        return self._keys(token_ids, block_size, parent, SPANS)

    def __len__(self) -> int:
        """Blocks remembered, counted once in each span that they are in."""
        return sum(map(len, self._young.values())) + sum(map(len, self._old.values()))

    def _keys(
        self, token_ids: bytes, block_size: int, parent: int, spans: tuple[int, ...]
    ) -> list[int]:
        if not spans:
            keys = block_keys(token_ids, block_size, parent)
            self.hashed += len(keys)
            return keys
        width = block_size * TOKEN_BYTES * spans[0]
        whole = len(token_ids) // width * width
        keys = []
        for start in range(0, whole, width):
            span = token_ids[start : start + width]
            name = xxh3_64_intdigest(span, parent)
            known = self._young.get(name)
            if known is None:
                known = self._old.pop(name, None) or self._keys(span, block_size, parent, spans[1:])
                self._remember(name, known)
            keys += known
            parent = known[-1]
        return keys + self._keys(token_ids[whole:], block_size, parent, spans[1:])

    def _remember(self, name: int, keys: list[int]) -> None:
        if self._new + len(keys) > self._half:
            self._old, self._young, self._new = self._young, {}, 0
        if len(keys) <= self._half:
            self._young[name] = keys
            self._new += len(keys)
