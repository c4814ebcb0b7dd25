"""Who of the tenants may go next: service over weights, with room to follow a hot branch.

Deficit longest prefix match (Cao et al. 2025, "Locality-aware fair scheduling in LLM serving"):
order is free among tenants whose service does not lead that of the least served by more than a
quantum. A deficit that is refilled for all at once is the same as a lead that is bounded. Those who
ask for little are not among those that wait long enough to be led: what was charged lately says who
takes more than his share of it, and such a tenant goes after all others; one that floods the fleet
does so at the replicas, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

HALF_S = 10.0  # what was charged so long ago counts half
OVER = 1.5  # times its share of what was charged lately, before a tenant is over it
FLOODS = 3.5  # times what the others had lately, on average, before a tenant floods the fleet
AGED_S = 1.0  # between two looks at how long ago it was


class Shares:
    """Tokens charged by tenant, divided by its weight (1 where none is named). Pure.

    Who waits for nothing earns nothing: a tenant that comes back starts with those that wait.
    """

    def __init__(self, weights: Mapping[str, float], quantum: float) -> None:
        if bad := sorted(tenant for tenant, weight in weights.items() if not weight > 0):
            raise ValueError(f"the weight of tenant {bad[0]!r} is not positive")
        self._weights = weights
        self._quantum = quantum
        self._service: dict[str, float] = {}  # of those that wait, and of those that lead them
        self._waiting: Counter[str] = Counter()
        self._lately: dict[str, float] = {}  # charged, old charges less
        self._total = self._weighing = 0.0  # of those: tokens, and weights
        self._aged_at = 0.0

    def entered(self, tenant: str) -> None:
        """A request of the tenant waits now."""
        if not self._waiting[tenant]:
            floor = self._floor()
            self._service[tenant] = max(self._service.get(tenant, floor), floor)
        self._waiting[tenant] += 1

    def left(self, tenant: str) -> None:
        """A request of the tenant waits no more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._settle()

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """The tenant was served."""
        if tenant in self._service:
            self._service[tenant] += tokens / self._weight(tenant)
        self._age(now)
        if tokens:
            if tenant not in self._lately:
                self._lately[tenant] = 0.0
                self._weighing += self._weight(tenant)
            self._lately[tenant] += tokens
            self._total += tokens

    def over(self, tenant: str) -> bool:
        """Whether of what was charged lately the tenant had more than its share among those who had
        any. Such a one takes what the others leave: they find room as if it were not there."""
        mine = self._lately.get(tenant, 0.0) * self._weighing
        return mine > OVER * self._weight(tenant) * self._total

    def floods(self, tenant: str) -> bool:
        """Whether the tenant had so much lately that replicas, too, shall serve it last."""
        mine, weight = self._lately.get(tenant, 0.0), self._weight(tenant)
        others = (self._total - mine) * weight
        return self.over(tenant) and mine * (self._weighing - weight) > FLOODS * others

    def eligible(self, waiting: Iterable[str]) -> list[str]:
        """Those of some that wait who may go next: never none, or a server would idle."""
        within = [tenant for tenant in waiting if not self.over(tenant)]
        served = {tenant: self._service[tenant] for tenant in within or waiting}
        ceiling = max(self._floor() + self._quantum, min(served.values()))
        return [tenant for tenant, service in served.items() if service <= ceiling]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _age(self, now: float) -> None:
        """Shares do not change by it, so that nobody need do it before asking for them."""
        if now - self._aged_at < AGED_S:
            return
        left = 0.5 ** ((now - self._aged_at) / HALF_S)
        self._aged_at = now
        aged = {tenant: tokens * left for tenant, tokens in self._lately.items()}
        self._lately = {tenant: tokens for tenant, tokens in aged.items() if tokens >= 1}
        self._total = sum(self._lately.values())
        self._weighing = sum(self._weight(tenant) for tenant in self._lately)

    def _floor(self) -> float:
        return min((self._service[tenant] for tenant in self._waiting), default=0.0)

    def _settle(self) -> None:
        """Forget who neither waits nor leads."""
        floor = self._floor()
        self._service = {
            tenant: service
            for tenant, service in self._service.items()
            if tenant in self._waiting or (self._waiting and service > floor)
        }
