"""Many routers that hear late, before the same replicas: what is left of the hits of one router.

Requests come to the routers in turn, so that a session, too, is spread over all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from bench.fleet.load import Load
from bench.fleet.simulation import Fleet, Served, Simulation
from replicas.simulated.profile import Profile
from router.schedule.policies import ADMISSION, policy
from router.schedule.scheduler import Rules

OURS = "hotbranch"
ROUTERS, REPORT_S = 16, 0.1
HIT = 0.95  # of the hit rate of one router


@dataclass(frozen=True, slots=True)
class Routers:
    """Sixteen routers over one that hears at once. `most_ahead` are the most uncached tokens that a
    replica had before it at any report, `bound` what the windows of all routers, each with one
    prompt beyond it, can bring to that."""

    hit_ratio: float
    ttft_ratio: float
    most_ahead: int
    most_ahead_of_one: int
    bound: int


def routers(load: Load, profile: Profile, replicas: int) -> Routers:
    """Two simulations."""
    one, alone = _play(load, profile, replicas, 1, 0.0)
    many, served = _play(load, profile, replicas, ROUTERS, REPORT_S)
    longest = max(each.tokens for each in served)
    return Routers(
        hit_ratio=_hits(served) / _hits(alone) if _hits(alone) else 1.0,
        ttft_ratio=sum(each.ttft for each in served) / sum(each.ttft for each in alone),
        most_ahead=many.most_ahead,
        most_ahead_of_one=one.most_ahead,
        bound=ROUTERS * (int(Rules().window * profile.chunk_tokens) + longest),
    )


def missed(found: Mapping[str, Routers]) -> Iterator[str]:
    """The aims that do not hold, in words."""
    for name, one in found.items():
        if one.hit_ratio < HIT:
            yield f"{name}: {ROUTERS} routers have {one.hit_ratio:.3f} of the hits of one"
        if one.most_ahead > one.bound:
            yield f"{name}: {one.most_ahead} tokens before one replica of {ROUTERS} routers"


def _play(
    load: Load, profile: Profile, replicas: int, routers: int, report_s: float
) -> tuple[Simulation, list[Served]]:
    fleet = Fleet(
        replicas,
        profile,
        load.block_size,
        ADMISSION[OURS],
        Rules(),
        routers=routers,
        report_s=report_s,
    )
    simulation = Simulation(fleet, partial(policy, OURS, 0))
    return simulation, simulation.run(load.play(), lambda: None)


def _hits(served: list[Served]) -> float:
    return sum(one.cached for one in served) / sum(one.tokens for one in served)
