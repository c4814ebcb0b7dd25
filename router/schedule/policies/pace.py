"""How fast work comes to a fleet, and what a second more of it costs those who come later."""

from collections.abc import Sequence
from math import exp

from router.schedule.server import Server

MEMORY_S = 10.0  # what is older by this counts a third
DEAREST = 5.0
FACTOR = 2.0  # of the queueing formula: measured best
FULL = 0.97  # of its time that a fleet is taken to work, at most
RECENT = 0.01  # weight of the last prompt among those before


class Pace:
    """Pure. `found` is the share of prompts that some server had, as a moving average.

    It begins with nothing, as a fleet does: until it has seen some seconds, work is cheap, and what
    begins hot spreads.
    """

    def __init__(self) -> None:
        self.found = 0.0
        self._jobs = self._work_s = 0.0
        self._at = 0.0

    def placed(self, work_s: float, found: float, now: float) -> None:
        """A job that needs `work_s` seconds was placed; of its prompt `found` was somewhere."""
        self._age(now)
        self._jobs += 1.0
        self._work_s += work_s
        self.found += RECENT * (found - self.found)

    def price(self, servers: Sequence[Server], now: float) -> float:
        """Seconds that a second of needless work costs those who come before a queue is empty: in
        an M/G/1 queue about rate * work before them / idle share (Kleinrock 1975, chapter 5).
        """
        self._age(now)
        each = MEMORY_S * len(servers)
        idle = 1.0 - min(FULL, self._work_s / each)
        waits_s = sum(server.drained_s for server in servers) / len(servers)
        return min(DEAREST, FACTOR * self._jobs / each * waits_s / idle)

    def _age(self, now: float) -> None:
        kept = exp((self._at - now) / MEMORY_S)
        self._at = now
        self._jobs *= kept
        self._work_s *= kept
