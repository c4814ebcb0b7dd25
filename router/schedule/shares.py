"""Who of the tenants may go next: service over weights, with room to follow a hot branch.

Deficit longest prefix match (Cao et al. 2025, "Locality-aware fair scheduling in LLM serving"):
order is free among tenants whose service does not lead that of the least served by more than a
quantum. A deficit that is refilled for all at once is the same as a lead that is bounded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping


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

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant was served."""
        if tenant in self._service:
            self._service[tenant] += tokens / self._weights.get(tenant, 1.0)

    def eligible(self, tenants: Iterable[str]) -> list[str]:
        """Those of some that wait who may go next: never none, or a server would idle."""
        served = {tenant: self._service[tenant] for tenant in tenants}
        ceiling = max(self._floor() + self._quantum, min(served.values()))
        return [tenant for tenant, service in served.items() if service <= ceiling]

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
