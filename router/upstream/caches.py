"""What an upstream's ranks hold: as their KV events tell, or as what was sent to them does."""

from collections import Counter

from hotbranch.settings import Upstream as Settings
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.index.index import Index


class Caches:
    """Feeds the index, in the name of the upstream's URL."""

    def __init__(self, index: Index, settings: Settings, totals: Counter[str]) -> None:
        self.recoveries: Counter[str] = Counter()
        self.heard_at = 0.0
        self._index = index
        self._holders = [Holder(settings.url, rank) for rank in range(settings.ranks)]

    @property
    def blocks(self) -> int:
        return 0

    def connected(self, description: Description, comparable: bool) -> None:
        for holder in self._holders:
            self._index.add(holder, description.block_size, description.capacity_blocks)

    def forget(self) -> None:
        for holder in self._holders:
            self._index.remove(holder)

    def close(self) -> None:
        for holder in self._holders:
            self._index.remove(holder)
