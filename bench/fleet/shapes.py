"""Load of the reference shapes, made up: tenants and families of prompts with Zipf popularity.

Sessions start as a Poisson process; the turns of one follow each other after a pause, whether the
answer is there or not. Pure, and the same for the same arguments.
"""

import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, count

from bench.fleet.traces import Arrival
from replicas.simulated.virtual import TOKEN

LONGEST = 8  # times the median: what a length is cut at
ZIPF = 1.0
TURNS = 12  # of one session, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens. Requests of a family share the parts `shared`; `own` are of one turn.

    `spread` is the standard deviation of the logarithm of own parts and replies, whose medians are
    given; 0 makes all the same. `rate` is in requests a second and replica, unless told otherwise.
    """

    rate: float
    families: int  # of each tenant
    shared: tuple[int, ...]
    own: tuple[int, ...]
    reply: int
    spread: float = 0.0
    turns: float = 1.0  # mean
    pause_s: float = 0.0  # mean
    permuted: bool = False  # the parts of each request come in an order of its own


RAG = Shape(rate=45, families=8, shared=(1000, 500), own=(200, 50), reply=64, spread=0.3)
SHAPES: Mapping[str, Shape] = {
    "rag": RAG,
    "agents": Shape(
        rate=16, families=8, shared=(600, 3000), own=(150,), reply=80,
        spread=0.6, turns=6, pause_s=4.0,
    ),
    "voice": Shape(rate=45, families=16, shared=(2000,), own=(60,), reply=100, spread=0.4),
    "chat": Shape(
        rate=20, families=1, shared=(), own=(120,), reply=200, spread=0.9, turns=4, pause_s=15.0
    ),
    "unique": Shape(rate=15, families=1, shared=(), own=(1500,), reply=100, spread=0.5),
    "permuted": replace(RAG, permuted=True),
}  # fmt: skip


@dataclass(slots=True)
class _Session:
    name: str
    tenant: str
    prompt: bytes
    turns: int  # left


def shaped(shape: Shape, requests: int, rate: float, tenants: int, seed: int) -> Iterator[Arrival]:
    """That many requests, at `rate` a second in the mean once sessions overlap."""
    rng = random.Random(f"shape {seed}")
    prefixes = _prefixes(shape, tenants, seed)
    names, families = _zipf(tenants), _zipf(shape.families)
    serial, starts = count(), 0.0
    coming: list[tuple[float, int, _Session]] = []  # next turns
    for _ in range(requests):
        while not coming or coming[0][0] >= starts:
            tenant = rng.choices(range(tenants), cum_weights=names)[0]
            family = rng.choices(range(shape.families), cum_weights=families)[0]
            prompt = _arranged(rng, shape, prefixes[tenant][family])
            number = next(serial)
            session = _Session(f"s{number}", f"tenant{tenant}", prompt, _turns(rng, shape))
            heappush(coming, (starts, number, session))
            starts += rng.expovariate(rate / shape.turns)
        at, _, session = heappop(coming)
        reply = _length(rng, shape, shape.reply)
        yield Arrival(at, session.prompt, reply, session.tenant, session.name)
        session.turns -= 1
        if session.turns:
            # What it answered is what the simulated replica generates, and has cached.
            session.prompt += array("I", [TOKEN.token]).tobytes() * reply
            session.prompt += b"".join(_own(rng, shape))
            pause = rng.expovariate(1 / shape.pause_s)
            heappush(coming, (at + pause, next(serial), session))


def _prefixes(shape: Shape, tenants: int, seed: int) -> list[list[list[bytes]]]:
    """Shared parts by tenant and family."""
    rng = random.Random(f"prefixes {seed}")
    return [
        [[rng.randbytes(4 * size) for size in shape.shared] for _ in range(shape.families)]
        for _ in range(tenants)
    ]


def _arranged(rng: random.Random, shape: Shape, shared: list[bytes]) -> bytes:
    parts = shared + _own(rng, shape)
    if shape.permuted:
        rng.shuffle(parts)
    return b"".join(parts)


def _own(rng: random.Random, shape: Shape) -> list[bytes]:
    return [rng.randbytes(4 * _length(rng, shape, size)) for size in shape.own]


def _length(rng: random.Random, shape: Shape, median: int) -> int:
    if not shape.spread:
        return median
    return max(1, int(median * min(LONGEST, rng.lognormvariate(0.0, shape.spread))))


def _turns(rng: random.Random, shape: Shape) -> int:
    turns = 1
    while turns < TURNS and rng.random() > 1 / shape.turns:
        turns += 1
    return turns


def _zipf(items: int) -> list[float]:
    """Cumulative weights: the k-th is drawn in proportion to 1 / k."""
    return list(accumulate(1 / k**ZIPF for k in range(1, items + 1)))
