"""Baselines that hash where a prompt belongs."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, beginning
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# substratusai/kubeai, api/k8s/v1/model_types.go: PrefixHash
REPLICATION = 256
MEAN_LOAD = 1.25


class SessionSticky(Immediate):
    """A session stays where it is, whatever the load: `consistent_hashing` of lightseekorg/smg
    (docs/concepts/routing/load-balancing.md), by rendezvous instead of a ring. Where a client names
    no session, the beginning of the prompt stands for it."""

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        session = job.session
        key = xxh3_64_intdigest(session.encode(), job.seed) if session else beginning(job)
        home = min(servers, key=lambda server: xxh3_64_intdigest(_name(server.holder), key))
        return Placement(home, "session")


class ConsistentHashBounded(Immediate):
    """substratusai/kubeai, internal/loadbalancer/balance_chwbl.go: consistent hashing with bounded
    loads (Mirrokni et al. 2018). From the hash of the prompt's beginning on, the first on the ring
    that would not have more than 1.25 times the mean of the requests in flight, which the router
    counts itself; where none is left, the first. KubeAI hashes 100 characters of the first user's
    turn; prompts come without their turns here.
    """

    def __init__(self) -> None:
        self._servers: dict[Holder, int] = {}  # where in the list
        self._ring: list[tuple[int, Holder]] = []

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._settle(servers)
        loads = [len(server.sent) for server in servers]
        bound = MEAN_LOAD * (sum(loads) + 1) / len(servers)
        start = bisect_left(self._ring, beginning(job), key=lambda point: point[0])
        first = self._at(start)
        if not any(loads) or loads[first] + 1 <= bound:
            return Placement(servers[first], "hash")
        if min(loads) + 1 > bound:
            return Placement(servers[first], "none_below_bound")
        return Placement(servers[self._walk(start, loads, bound)], "next")

    def _walk(self, start: int, loads: Sequence[int], bound: float) -> int:
        """As many steps as there are servers, on average, even if only one is below the bound."""
        points = map(self._at, range(start, start + len(self._ring)))
        return next(at for at in points if loads[at] + 1 <= bound)

    def _at(self, point: int) -> int:
        return self._servers[self._ring[point % len(self._ring)][1]]

    def _settle(self, servers: Sequence[Server]) -> None:
        """Servers that are new, or gone, change the ring."""
        if list(self._servers) == [server.holder for server in servers]:
            return
        known = self._servers
        self._servers = {server.holder: i for i, server in enumerate(servers)}
        if known.keys() != self._servers.keys():
            self._ring = [point for point in self._ring if point[1] in self._servers]
            for holder in self._servers.keys() - known.keys():
                self._ring += [
                    (xxh3_64_intdigest(_name(holder) + b"%d" % i), holder)
                    for i in range(REPLICATION)
                ]
            self._ring.sort()


def _name(holder: Holder) -> bytes:
    return f"{holder.replica}/{holder.rank}".encode()
