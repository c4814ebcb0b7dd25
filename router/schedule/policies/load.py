"""Baselines that know nothing of caches."""

from collections.abc import Mapping, Sequence
from random import Random

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, least
from router.schedule.scheduler import Placement
from router.schedule.server import Server


class RoundRobin(Immediate):
    """One after the other (lightseekorg/smg, model_gateway/src/policies/round_robin.rs)."""

    def __init__(self) -> None:
        self._turns = 0

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        turn, self._turns = self._turns % len(servers), self._turns + 1
        return Placement(servers[turn], "turn")


class LeastLoad(Immediate):
    """The least prefill still to do, then the fewest requests. Knows what it sent since the last
    report: what load alone can do at best."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        tokens = [server.outstanding.tokens for server in servers]
        low = min(tokens)
        idlest = [server for server, load in zip(servers, tokens, strict=True) if load == low]
        requests = [len(server.sent) for server in idlest]
        return Placement(least(idlest, requests, self._random), "load")


class PowerOfTwo(Immediate):
    """Of two at random the one with fewer requests, the first where they are equal
    (sgl-project/sglang, sgl-router/src/policies/power_of_two.rs; lightseekorg/smg compares tokens
    where it is told of them). The router counts the requests in flight itself."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        two = self._random.sample(servers, min(2, len(servers)))
        return Placement(min(two, key=lambda server: len(server.sent)), "two")
