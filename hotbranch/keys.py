"""Block keys: the names under which router and replicas speak of cached prefixes.

A block is `block_size` token ids, as little-endian uint32 bytes. The key of a block is
`xxh3_64(block, seed=key of the block before it)`, and the seed of the first is `root(namespace)`,
so that one key names a whole path from the root, under one namespace. Only whole blocks have keys.
Both sides hash token ids themselves; no engine's own hashes enter. A collision can only misroute:
the engine compares tokens.
"""

from functools import lru_cache
from struct import Struct, pack

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4
KNOWN = 0x797811BA2196EFD9  # `key_check`
GROUP = 32  # blocks cut off at once, which takes half the time of one slice for each


def root(model: str, adapter: str = "", salt: str = "") -> int:
    """The root seed of a namespace, as an unsigned 64-bit integer."""
    parts = (part.encode() for part in (model, adapter, salt))
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def key_check() -> int:
    """The key of a fixed prompt, which two processes must agree on to speak of the same blocks.

    Raises ValueError when what is installed here computes other keys than the contract says.
    """
    prompt = pack(f"<{3 * GROUP}I", *range(3 * GROUP))
    key = block_keys(prompt, 2, root("model", "adapter", "salt"))[-1]
    if key != KNOWN:
        raise ValueError(f"xxhash computes block keys of its own here ({key:016x}): reinstall it")
    return key


def block_keys(token_ids: bytes, block_size: int, parent: int) -> list[int]:
    """Keys of the whole blocks in `token_ids`; `parent` is the key (or root) before the first."""
    width = block_size * TOKEN_BYTES
    count = len(token_ids) // width
    grouped = count // GROUP * GROUP * width
    keys = []
    for group in _cutter(width, GROUP).iter_unpack(token_ids[:grouped]):
        for block in group:
            parent = xxh3_64_intdigest(block, parent)
            keys.append(parent)
    for block in _cutter(width, count % GROUP).unpack(token_ids[grouped : count * width]):
        parent = xxh3_64_intdigest(block, parent)
        keys.append(parent)
    return keys


@lru_cache(maxsize=4 * GROUP)
def _cutter(width: int, count: int) -> Struct:
    """Cuts bytes into `count` pieces of `width`."""
    return Struct(f"{width}s" * count)
