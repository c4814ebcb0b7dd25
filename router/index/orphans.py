"""Blocks that a holder reported without holding the block before them.

An engine that evicts from the middle keeps what is below, of no use until the middle is computed
again. Then it counts once more, without a new report.
"""

from collections.abc import Iterator


class Orphans:
    """Of one holder. Pure."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: int) -> bool:
        return key in self._parents

    def below(self, key: int) -> bool:
        """Whether there are orphans right below a block."""
        return key in self._children

    def __iter__(self) -> Iterator[int]:
        return iter(self._parents)

    def add(self, parent: int, key: int) -> None:
        """A block below `parent`, which is not held."""
        self._parents[key] = parent
        self._children.setdefault(parent, {})[key] = None

    def copy(self) -> "Orphans":
        """The same of another holder."""
        other = Orphans()
        for key, parent in self._parents.items():
            other.add(parent, key)
        return other

    def discard(self, key: int) -> None:
        """A block is not held any more; those below it stay."""
        parent = self._parents.pop(key, None)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]

    def adopt(self, parent: int) -> Iterator[tuple[int, int]]:
        """Take out all below a block that is held now, as (parent, key), parents first."""
        parents = [parent]
        while parents:
            parent = parents.pop()
            for key in list(self._children.get(parent, ())):
                self.discard(key)
                parents.append(key)
                yield parent, key
