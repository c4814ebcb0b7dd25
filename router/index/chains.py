"""Block keys of prompts, remembered: a prefix that was seen before is not hashed block by block.

Spans of `SPAN` blocks are looked up by one hash over all their bytes, seeded with the key before
them, so a repeated prefix costs a pass of the hash and a lookup a span.
"""

from xxhash import xxh3_64_intdigest

from hotbranch.keys import TOKEN_BYTES, block_keys

SPAN = 64  # blocks


class KeyChains:
    """Remembers the keys of up to `limit` spans, those used most recently.

    `hashed` counts the blocks that had to be hashed one by one. Like a key, the name of a span can
    collide with another; the prompt is then only placed badly.
    """

    def __init__(self, limit: int = 1 << 14) -> None:
        self.hashed = 0
        self._half = max(1, limit // 2)
        # Two generations instead of a linked list: what is used again moves to the young one, and
        # the old one goes when the young one is full.
        self._young: dict[int, list[int]] = {}
        self._old: dict[int, list[int]] = {}

    def keys(self, token_ids: bytes, block_size: int, parent: int) -> list[int]:
        """The same as `hotbranch.keys.block_keys`."""
        width = block_size * TOKEN_BYTES * SPAN
        whole = len(token_ids) // width * width
        keys: list[int] = []
        for start in range(0, whole, width):
            span = token_ids[start : start + width]
            name = xxh3_64_intdigest(span, parent)
            known = self._young.get(name) or self._recall(name, span, block_size, parent)
            keys += known
            parent = known[-1]
        rest = block_keys(token_ids[whole:], block_size, parent)
        self.hashed += len(rest)
        return keys + rest

    def __len__(self) -> int:
        """Spans remembered."""
        return len(self._young) + len(self._old)

    def _recall(self, name: int, span: bytes, block_size: int, parent: int) -> list[int]:
        keys = self._old.pop(name, None)
        if keys is None:
            keys = block_keys(span, block_size, parent)
            self.hashed += len(keys)
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[name] = keys
        return keys
