"""What prefix caches alone make of a load: no time, no decoding, no queue.

A prompt is in the cache of its replica at once, and what is longest unused goes first. That is what
hit rates are usually published for, and a check on the parts that the simulator is made of.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.fleet.traces import Arrival
from hotbranch.keys import TOKEN_BYTES, block_keys, root
from replicas.engine import Namespace
from replicas.radix.pool import BlockPool
from replicas.radix.tree import RadixTree
from router.fleet.holder import Holder
from router.index.index import Index

SPACE = Namespace("caches")
SEED = root("caches")
HALF = 0.5

# (number of the request, its tokens, matched tokens and computed tokens so far by replica) -> which
Route = Callable[[int, int, Sequence[int], Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Cached:
    """Of all prompt tokens the share that was there, and the most computed by a replica against
    the mean."""

    hit_rate: float
    imbalance: float


class Cache:
    """The tree of one replica and its blocks. Least recent use alone decides what goes."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.tree = RadixTree(block_size, pin_limit=0, probation=blocks)
        self._pool = BlockPool(blocks)

    def serve(self, prompt: bytes, now: float) -> int:
        """Leading tokens that were there. The rest, as far as it has room, is there from now on."""
        tree, width = self.tree, self.tree.block_size * TOKEN_BYTES
        prefix = tree.acquire(SPACE, prompt, len(prompt) // TOKEN_BYTES - 1, now)
        held = len(prefix.blocks)
        room = self._pool.available + tree.evictable
        end = held + min(len(prompt) // width - held, room)
        self._pool.free(tree.evict(end - held - self._pool.available, now))
        fresh = self._pool.alloc(end - held)
        extension = tree.extend(prefix.node, prompt[held * width : end * width], fresh, now)
        self._pool.free(fresh[: len(extension.resident)])
        tree.release(extension.node, now)
        return held * tree.block_size


def play(
    arrivals: Iterable[Arrival], replicas: int, kv_tokens: int, block_size: int, route: Route
) -> Cached:
    """Route by what the index says."""
    caches = [Cache(kv_tokens // block_size, block_size) for _ in range(replicas)]
    index, holders = Index(), [Holder(f"r{number}") for number in range(replicas)]
    for holder in holders:
        index.add(holder, block_size)
    computed, total, hits = [0] * replicas, 0, 0
    for number, arrival in enumerate(arrivals):
        depths: Mapping[Holder, int] = index.match(
            block_keys(arrival.prompt, block_size, SEED)
        ).depths()
        longest = (arrival.tokens - 1) // block_size
        matched = [min(depths.get(holder, 0), longest) * block_size for holder in holders]
        chosen = route(number, arrival.tokens, matched, computed)
        cached = caches[chosen].serve(arrival.prompt, number)
        assert cached == matched[chosen], "the index says what the cache has"
        stored, evicted = caches[chosen].tree.changes.drain()
        for run in stored:
            index.store(holders[chosen], run.parent, run.keys, number)
        index.evict(holders[chosen], evicted)
        computed[chosen] += arrival.tokens - cached
        total, hits = total + arrival.tokens, hits + cached
    return Cached(hits / total, max(computed) * replicas / max(1, sum(computed)))


def ideal(arrivals: Iterable[Arrival], block_size: int) -> float:
    """The hit rate of one cache that never forgets."""
    known: set[int] = set()
    total = hits = 0
    for arrival in arrivals:
        hits += ideal_hit(arrival.prompt, block_size, known)
        total += arrival.tokens
    return hits / total


def ideal_hit(prompt: bytes, block_size: int, known: set[int], reply: bytes = b"") -> int:
    """Leading tokens of whole blocks among the `known` keys, which get those of prompt and reply.

    One token is always computed, to have logits to sample from.
    """
    keys = block_keys(prompt + reply, block_size, SEED)
    depth, longest = 0, (len(prompt) // TOKEN_BYTES - 1) // block_size
    while depth < longest and keys[depth] in known:
        depth += 1
    known.update(keys[depth:])
    return depth * block_size


def round_robin(number: int, tokens: int, matched: Sequence[int], computed: Sequence[int]) -> int:
    return number % len(matched)


def longest_match(number: int, tokens: int, matched: Sequence[int], computed: Sequence[int]) -> int:
    """Of those that have most the one that has computed least."""
    return min(range(len(matched)), key=lambda i: (-matched[i], computed[i]))


def match_or_least_load(
    number: int, tokens: int, matched: Sequence[int], computed: Sequence[int]
) -> int:
    """The longest match where it is most of the prompt, else whoever has computed least."""
    best = longest_match(number, tokens, matched, computed)
    if matched[best] > HALF * tokens:
        return best
    return min(range(len(matched)), key=computed.__getitem__)
