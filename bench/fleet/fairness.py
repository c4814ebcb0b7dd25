"""One tenant that asks for ten times what each of the others does, and what that costs them.

The light tenants are each within their share of the fleet; the heavy one overloads it. They are
played alone and together with it, the very same requests. Pure, and the same each time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import takewhile

from bench.fleet.load import BLOCK
from bench.fleet.report import jain, percentile
from bench.fleet.shapes import SHAPES, Shape, shaped
from bench.fleet.simulation import Fleet, Served, Simulation
from bench.fleet.traces import Arrival
from replicas.simulated.profile import DEFAULT, Profile
from router.schedule.policies import ADMISSION
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.scheduler import OUTPUT, Rules

HEAVY = "heavy"
WARM_S = 5.0  # not judged: nobody has been served yet, and caches are empty
LIGHT_P99, JAIN = 1.5, 0.95


@dataclass(frozen=True, slots=True)
class Crowd:
    """`rate` of a light tenant, in requests a second; the heavy one sends `heavier` times that."""

    shape: Shape
    rate: float
    light: int = 8
    heavier: float = 10.0
    seconds: float = 30.0
    replicas: int = 8
    weights: Mapping[str, float] = field(default_factory=dict)

    def arrivals(self, heavy: bool) -> Iterator[Arrival]:
        """With the heavy tenant or without. Each tenant has prefixes of its own."""
        rates = {f"light{number}": self.rate for number in range(self.light)}
        if heavy:
            rates[HEAVY] = self.rate * self.heavier
        streams = [
            self._stream(name, rate, seed) for seed, (name, rate) in enumerate(rates.items())
        ]
        return merge(*streams, key=lambda arrival: arrival.at)

    def _stream(self, tenant: str, rate: float, seed: int) -> Iterator[Arrival]:
        enough = int(2 * rate * self.seconds) + 100
        every = shaped(self.shape, enough, rate, 1, seed)
        for arrival in takewhile(lambda arrival: arrival.at < self.seconds, every):
            yield replace(arrival, tenant=tenant, session=f"{tenant} {arrival.session}")


DOCUMENTS = Shape(rate=5, families=4, shared=(1000,), own=(3000,), reply=40, spread=0.5)
# Overload for less than the starvation bound: whoever waited longer goes first, whose he may be.
CROWDS: Mapping[str, Crowd] = {
    "documents": Crowd(DOCUMENTS, rate=5.2),
    "unique": Crowd(SHAPES["unique"], rate=12.0),
}


@dataclass(frozen=True, slots=True)
class Fairness:
    """`light_p99_ratio`: the 99th percentile of the light tenants' times to the first token over
    what it is without the heavy one, `worst_p99_ratio` that of the tenant that suffers most. `jain`
    is Jain's index of what `shares` says. Times in seconds.
    """

    light_p99_ratio: float
    worst_p99_ratio: float
    light_p99: float
    alone_p99: float
    jain: float


def fairness(crowd: Crowd) -> Fairness:
    """Two simulations."""
    alone, together = play(crowd, heavy=False), play(crowd, heavy=True)
    before, after = _p99(alone), _p99(together)
    every, light = _pooled(alone), _pooled(together)
    served = shares(together, crowd.weights, *backlog(together, crowd.seconds))
    return Fairness(
        light_p99_ratio=light / every,
        worst_p99_ratio=max(after[tenant] / before[tenant] for tenant in before),
        light_p99=light,
        alone_p99=every,
        jain=jain(list(served.values())),
    )


def missed(found: Mapping[str, Fairness]) -> Iterator[str]:
    """The aims that do not hold, in words."""
    for name, fair in found.items():
        if fair.light_p99_ratio > LIGHT_P99:
            yield f"fairness, {name}: p99 TTFT of light tenants {fair.light_p99_ratio:.2f} of alone"
        if fair.jain < JAIN:
            yield f"fairness, {name}: Jain's index {fair.jain:.3f}"


def play(crowd: Crowd, heavy: bool) -> list[Served]:
    """With the heavy tenant or without, in order of arrival."""
    profile = Profile.load(DEFAULT)
    admission = ADMISSION["hotbranch"]
    fleet = Fleet(crowd.replicas, profile, BLOCK, admission, Rules(), weights=crowd.weights)
    simulation = Simulation(fleet, Hotbranch)
    return simulation.run(crowd.arrivals(heavy), lambda: None)


def backlog(served: Sequence[Served], end: float) -> tuple[float, float]:
    """The longest time up to `end` in which the heavy tenant always has a request that waits for
    its first token."""
    best = start, until = 0.0, 0.0
    for one in sorted((one for one in served if one.tenant == HEAVY), key=lambda one: one.at):
        if one.at > until:
            start = one.at
        until = max(until, one.first)
        best = max(best, (start, min(until, end)), key=lambda span: span[1] - span[0])
    return best


def shares(
    served: Sequence[Served], weights: Mapping[str, float], start: float, end: float
) -> dict[str, float]:
    """By tenant, what it was served from `start` to `end` over what it was entitled to.

    Service is what is charged: prompt tokens that were not cached, as the first token comes, and
    twice the tokens of the reply, evenly until the last. A tenant is entitled to the lesser of what
    it asked for (arrived before `end`, not yet served by `start`) and its share of all that was
    served in that time: max-min fairness by weights, what one does not ask for going to the others.
    """
    got: dict[str, float] = {}
    asked: dict[str, float] = {}
    for one in served:
        if one.at < end:
            before, within = _service(one, 0.0, start), _service(one, start, end)
            got[one.tenant] = got.get(one.tenant, 0.0) + within
            left = _service(one, 0.0, float("inf")) - before
            asked[one.tenant] = asked.get(one.tenant, 0.0) + left
    entitled = max_min(asked, weights, sum(got.values()))
    return {tenant: got[tenant] / entitled[tenant] for tenant in got if entitled[tenant]}


def max_min(
    asked: Mapping[str, float], weights: Mapping[str, float], capacity: float
) -> dict[str, float]:
    """Everybody gets what he asks for, or as much for his weight as anybody."""
    given: dict[str, float] = {}
    order = sorted(asked, key=lambda tenant: asked[tenant] / weights.get(tenant, 1.0))
    weight = sum(weights.get(tenant, 1.0) for tenant in order)
    for tenant in order:
        mine = weights.get(tenant, 1.0)
        given[tenant] = min(asked[tenant], capacity * mine / weight)
        capacity, weight = capacity - given[tenant], weight - mine
    return given


def _service(one: Served, start: float, end: float) -> float:
    prompt = one.tokens - one.cached if start <= one.first < end else 0
    spent = max(0.0, min(end, one.last) - max(start, one.first))
    length = one.last - one.first
    part = spent / length if length else float(start <= one.first < end)
    return prompt + OUTPUT * one.generated * part


def _pooled(served: Sequence[Served]) -> float:
    light = [one for one in served if one.tenant != HEAVY and one.at >= WARM_S]
    return percentile(sorted(one.ttft for one in light), 0.99)


def _p99(served: Sequence[Served]) -> dict[str, float]:
    tenants = {one.tenant for one in served} - {HEAVY}
    return {name: _pooled([one for one in served if one.tenant == name]) for name in tenants}
