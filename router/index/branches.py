"""The hottest branches of the index, as a tree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from router.fleet.holder import Holder
from router.index.heat import rate
from router.index.tree import Node


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of tokens, from `start` to before `end` of its prompts, and what hangs below it.

    `key` is that of its last block. `rates` are the tokens that each holder serves in a second to
    prompts that go through here, `held` the tokens of the run that each one has on
    its GPU.
    """

    key: int
    start: int
    end: int
    rates: Mapping[Holder, float]
    held: Mapping[Holder, int]
    children: list["Branch"] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(self.rates.values())


def hottest(
    root: Node, limit: int, now: float, holder_of: Callable[[int], tuple[Holder, int]]
) -> list[Branch]:
    """The `limit` hottest branches, hottest first among siblings.

    `holder_of` gives the holder of a bit and its block size. What goes through a branch goes
    through those above it, so they are at least as hot: the search is best-first, and looks at
    no more than the children of what it finds.
    """
    branches: list[Branch] = []
    serial = count()
    queue: list[tuple[float, int, Node, int, list[Branch]]] = []

    def offer(above: Node, start: int, siblings: list[Branch]) -> None:
        for node in above.children.values():
            if node.heat:
                heat = sum(rate(h, now) * holder_of(bit)[1] for bit, h in node.heat.items())
                heappush(queue, (-heat, next(serial), node, start, siblings))

    offer(root, 0, branches)
    for _ in range(limit):
        if not queue:
            break
        _, _, node, start, siblings = heappop(queue)
        branch = _branch(node, start, now, holder_of)
        siblings.append(branch)
        offer(node, branch.end, branch.children)
    return branches


def _branch(
    node: Node, start: int, now: float, holder_of: Callable[[int], tuple[Holder, int]]
) -> Branch:
    rates, held, size = {}, {}, 1
    for bit in node.bits():
        holder, size = holder_of(bit)  # all of one node have one block size: keys tell sizes apart
        if holder.tier:
            continue
        held[holder] = node.held(bit) * size
        if node.heat and bit in node.heat:
            rates[holder] = rate(node.heat[bit], now) * size
    return Branch(node.keys[-1], start, start + len(node.keys) * size, rates, held)
