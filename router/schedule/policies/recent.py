"""The blocks that were sent to a server, for a router that does not hear what became of them."""

from collections import OrderedDict
from collections.abc import Sequence

from router.schedule.policies.parts import leading


class Recent:
    """Keys of blocks, the least recently used first, and what follows a block before the block."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def depth(self, keys: Sequence[int]) -> int:
        """Leading blocks that are there."""
        return leading(keys, self._keys)

    def use(self, keys: Sequence[int], limit: int) -> None:
        """A prompt was sent. Beyond `limit` blocks the oldest go, tails first."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > limit:
            self._keys.popitem(last=False)
