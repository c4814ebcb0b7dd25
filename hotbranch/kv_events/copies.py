"""How many copies of each block a tier has, where several groups of layers must each hold it."""

from collections.abc import Iterator

from hotbranch.kv_events.decode import Id


class Copies:
    """Of one tier. Groups are named by the engine, or None where it has none.

    Of a block there are as many copies as in the group that has the fewest.
    """

    def __init__(self) -> None:
        self.total = 0
        self._groups: dict[int | None, dict[Id, int]] = {}

    def __contains__(self, block: Id) -> bool:
        """Whether any group holds it."""
        return any(block in held for held in self._groups.values())

    def has_group(self, group: int | None) -> bool:
        return group in self._groups

    def add_group(self, group: int | None) -> None:
        """A group that holds nothing yet, so that there are no copies of anything any more."""
        self._groups[group] = {}
        self.total = 0

    def put(self, group: int | None, block: Id) -> int:
        """One copy more in a group; how many copies more that makes: none or one."""
        held = self._groups[group]
        held[block] = count = held.get(block, 0) + 1
        rise = self._completes(count, block)
        self.total += rise
        return rise

    def take(self, group: int | None, block: Id) -> int | None:
        """One copy less in a group; how many copies less that makes. None where it had none."""
        held = self._groups.get(group, {})
        count = held.get(block)
        if count is None:
            return None
        fall = self._completes(count, block)
        if count > 1:
            held[block] = count - 1
        else:
            del held[block]
        self.total -= fall
        return fall

    def count(self, block: Id) -> int:
        return min((held.get(block, 0) for held in self._groups.values()), default=0)

    def items(self) -> Iterator[tuple[Id, int]]:
        """Blocks of which there are copies, and how many."""
        first = next(iter(self._groups.values()), {})
        if len(self._groups) == 1:
            yield from first.items()
            return
        for block in first:
            if count := self.count(block):
                yield block, count

    def clear(self) -> None:
        """All blocks; the groups stay."""
        for held in self._groups.values():
            held.clear()
        self.total = 0

    def _completes(self, count: int, block: Id) -> int:
        """Whether the `count`th copy in one group is there in each other group, too."""
        groups = self._groups.values()
        return int(len(groups) == 1 or all(held.get(block, 0) >= count for held in groups))
