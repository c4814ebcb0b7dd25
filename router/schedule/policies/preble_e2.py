"""E2, the global scheduler of Preble."""

from collections import deque
from collections.abc import Mapping, Sequence

from router.fleet.holder import Holder
from router.schedule.job import Job
from router.schedule.policies.parts import Immediate, PerServer
from router.schedule.scheduler import Placement
from router.schedule.server import Server

# WukLab/preble, multi_node/global_scheduler{,_with_time}.py
WINDOW_S = 180.0  # H
REBALANCE = 1.15  # Th: HIGH_LOAD_THRESHOLD
WARM = 50  # requests before anything is rebalanced
OUTPUT = 45  # tokens of a request that does not say
SLOTS = 60  # of a window


class Window:
    """Seconds of prefill and requests of the last H seconds, to a slot."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.requests = 0
        self._slots: deque[tuple[int, float]] = deque()  # number of the slot, seconds
        self._requests: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, seconds: float, now: float) -> None:
        """A request was placed."""
        self.forget(now)
        slot = int(now * SLOTS / WINDOW_S)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = slot, self._slots[-1][1] + seconds
            self._requests[-1] += 1
        else:
            self._slots.append((slot, seconds))
            self._requests.append(1)
        self.seconds += seconds
        self.requests += 1

    def forget(self, now: float) -> None:
        """What is older than the window no longer counts."""
        oldest = int(now * SLOTS / WINDOW_S) - SLOTS
        if not self._slots or self._slots[0][0] > oldest:
            return
        while self._slots and self._slots[0][0] <= oldest:
            self._slots.popleft()
            self.requests -= self._requests.popleft()
        self.seconds = sum(seconds for _, seconds in self._slots)


class PrebleE2(Immediate):
    """Srivatsa et al. 2025, "Preble: efficient distributed prompt scheduling for LLM serving"
    (ICLR, arXiv:2407.00023), section 3.2, algorithms 1 and 2; WukLab/preble.

    Exploit where more of the prompt is cached than not: the longest match, of equal ones the least
    load. If that is the heaviest server, and it has more than Th times the load of the lightest,
    the lightest takes the prompt. Else explore: the least L + M + P, in seconds. L is the prefill
    of what was placed in the last H seconds and, as in the code, the decoding of what is there; M
    what is evicted, times how often it was used; P the prompt's own uncached prefill.

    Estimates: prefill is linear, as the server measured it; outputs have Preble's default length;
    what is evicted was used by one request of the window, for the least recently used goes first.
    Left out: copying a prefix whose queueing time doubles, and the balance of decode against
    prefill, for which a router would have to be told of first tokens.
    """

    def __init__(self) -> None:
        self._windows: PerServer[Window] = PerServer(Window)
        self._placed = 0

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        self._windows.keep(servers)
        cached = [matched.get(server.holder, 0) * server.block_size for server in servers]
        loads = [self._load(server, now) for server in servers]
        at, reason = self._choose(job, servers, cached, loads)
        seconds = (job.tokens - cached[at]) * servers[at].prefill_s_per_token
        self._windows.of(servers[at]).add(seconds, now)
        self._placed += 1
        return Placement(servers[at], reason)

    def _choose(
        self, job: Job, servers: Sequence[Server], cached: Sequence[int], loads: Sequence[float]
    ) -> tuple[int, str]:
        everywhere, longest = range(len(servers)), max(cached)
        if longest > job.tokens - longest:
            best = min((i for i in everywhere if cached[i] == longest), key=loads.__getitem__)
            light = min(everywhere, key=loads.__getitem__)
            uneven = loads[best] == max(loads) and loads[best] > REBALANCE * loads[light]
            if uneven and self._placed >= WARM:
                return light, "rebalance"
            return best, "exploit"
        costs = [
            load + self._eviction(server, job.tokens - tokens) + _prefill(server, job, tokens)
            for server, load, tokens in zip(servers, loads, cached, strict=True)
        ]
        return min(everywhere, key=costs.__getitem__), "explore"

    def _load(self, server: Server, now: float) -> float:
        window = self._windows.of(server)
        window.forget(now)
        return window.seconds + len(server.sent) * OUTPUT * server.step_s

    def _eviction(self, server: Server, tokens: int) -> float:
        """Seconds to prefill what `tokens` would evict, times the part of the requests that use
        it."""
        report = server.report
        if report is None:
            return 0.0
        free = report.total_blocks - max(report.cached_blocks, report.used_blocks)
        evicted = max(0, tokens - free * server.block_size)
        return evicted * server.prefill_s_per_token / max(1, self._windows.of(server).requests)


def _prefill(server: Server, job: Job, cached: int) -> float:
    return (job.tokens - cached) * server.prefill_s_per_token
