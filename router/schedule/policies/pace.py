"""How fast work comes to a fleet, and what a second more of it costs those who come later."""

from collections.abc import Sequence
from math import exp, inf

from router.schedule.server import Server

MEMORY_S = 10.0  # what is older by this counts a third
LOOK_S = 0.01  # between two looks at the servers
LEAST, DEAREST = 0.5, 5.0  # an idle fleet, too, keeps the siblings of a burst together
FACTOR = 2.0  # of the queueing formula: measured best
FULL = 0.97  # of its time that a fleet is taken to work, at most
RECURRING = 0.05  # of what prompts ask for is found somewhere: then they do recur
RECENT = 0.01  # weight of the last prompt, or look, among those before


class Pace:
    """Pure. `price` are the seconds that a second of needless work costs those who come before a
    queue is empty, `found` the share of prompts that some server had, as a moving average, and
    `step_s` the seconds by which a request that runs makes a decoding step longer.

    It begins with nothing, as a fleet does: until it has seen some seconds, work is cheap, and what
    begins hot spreads.
    """

    def __init__(self) -> None:
        self.price, self.step_s = LEAST, 0.0
        self.found = RECURRING  # assumed until they do not
        self._shortest_s = inf  # step that any server has measured: what an empty one takes
        self._jobs = self._work_s = 0.0
        self._at = 0.0
        self._looked_at = -inf
        self._ours, self._all = 1.0, 1.0  # requests in flight, as moving averages

    @property
    def alone(self) -> bool:
        """Whether most requests are placed by this router."""
        return self._all < 2 * self._ours

    def placed(self, work_s: float, found: float, now: float) -> None:
        """A job that needs `work_s` seconds was placed; of its prompt `found` was somewhere."""
        self._age(now)
        self._jobs += 1.0
        self._work_s += work_s
        self.found += RECENT * (found - self.found)

    def look(self, servers: Sequence[Server], now: float) -> None:
        """How the servers stand. In an M/G/1 queue a second costs about rate * work before them /
        idle share (Kleinrock 1975, chapter 5); our rate is that of all, by what is in flight.
        """
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._age(now)
        requests = sum(server.requests for server in servers)
        self._ours += RECENT * (sum(len(server.sent) for server in servers) - self._ours)
        self._all += RECENT * (requests - self._all)
        self._shortest_s = min(self._shortest_s, *(s.step_s or inf for s in servers))
        steps = [s.step_s for s in servers if s.step_s and s.requests]  # else what it says is old
        longer_s = sum(steps) - len(steps) * self._shortest_s if steps else 0.0
        self.step_s = longer_s / max(requests, len(servers))
        each = MEMORY_S * len(servers) * self._ours / max(self._ours, self._all)
        idle = 1.0 - min(FULL, self._work_s / each)
        waits_s = sum(server.drained_s for server in servers) / len(servers)
        price = FACTOR * self._jobs / each * waits_s / idle
        self.price = min(DEAREST, max(LEAST, price))

    def _age(self, now: float) -> None:
        kept = exp((self._at - now) / MEMORY_S)
        self._at = now
        self._jobs *= kept
        self._work_s *= kept
