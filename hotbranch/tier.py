"""Where a block of KV cache lies."""

from enum import IntEnum


class Tier(IntEnum):
    """The values of the contract's Tier."""

    GPU = 0
    CPU = 1
    DISK = 2
