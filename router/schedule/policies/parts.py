"""What several of the baselines are made of."""

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from random import Random
from typing import Generic, TypeVar

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.server import Server

T = TypeVar("T")
BEGINNING = 1024  # tokens


class Immediate:
    """A job goes out at once."""

    holds: bool = False

    def sent(self, job: Job, server: Server, now: float) -> None:
        pass

    def ended(self, job: Job, server: Server, now: float) -> None:
        pass


class PerServer(Generic[T]):
    """Something for each server. What was for those that are gone goes with them."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: dict[Holder, tuple[Server, T]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, server: Server) -> T:
        """That of a server. One that comes back under its name is another one."""
        known = self._of.get(server.holder)
        if known is None or known[0] is not server:
            known = self._of[server.holder] = server, self._make()
        return known[1]

    def known(self, server: Server) -> T | None:
        """That of a server, where there is any."""
        owner, state = self._of.get(server.holder, (None, None))
        return state if owner is server else None

    def keep(self, servers: Sequence[Server]) -> None:
        """These are all there are."""
        if len(self._of) > len(servers):
            self._of = {
                server.holder: self._of[server.holder]
                for server in servers
                if server.holder in self._of
            }


def least(servers: Sequence[Server], costs: Sequence[float], random: Random) -> Server:
    """One that costs least. Of equal ones any, or the first would get all that an idle fleet is
    sent."""
    low = min(costs)
    return random.choice(
        [server for server, cost in zip(servers, costs, strict=True) if cost == low]
    )


def leading(keys: Sequence[int], held: Container[int]) -> int:
    """How many leading blocks are held, where no block is without those before it."""
    return bisect_left(keys, True, key=lambda key: key not in held)


def beginning(job: Job) -> int:
    """Names the first 1,024 tokens of a prompt: a system prompt, as a rule, and the beginning of
    the first user's turn, which the later turns of a session have in common. A shorter prompt is
    named by its whole blocks."""
    size = min(job.keys)
    keys = job.keys[size]
    return keys[min(len(keys), max(1, BEGINNING // size)) - 1] if keys else job.seed
