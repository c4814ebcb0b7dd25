"""How many replicas the outstanding work needs: what each one measures, and the policy for Serve.

Two things ask for replicas. What waits has to be computed in `target_queue_s` seconds, and a
replica that is in use for more than BUSY of the time has no room for a burst. What waits says
nothing while replicas keep up, so the second one alone says how many may go: the load of those that
are left is known before it comes to them. A replica more or less has to pay by a margin, or noise
would move them to and fro.

Serve takes this module along by value, so it imports nothing of ours when it runs.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from replicas.engine import Load

BUSY = 0.8  # of its time, or of its cache: in use for more, a replica is too full
MARGIN = 0.65  # of what asks for a replica, below which one goes
SAMPLE_S = 0.1
MOST_SAMPLES = 600  # that are kept while nobody asks
REPORT_S = 10.0  # between two reports of a replica, which Serve averages over the last LOOK_BACK_S
LOOK_BACK_S = 15.0


class Meter:
    """What one replica does, averaged since it was last asked.

    `ahead_s` are the seconds of prefill that it still has to compute, `prefills` is the share of
    the time in which there were any, also because there was no place in the batch, and `held` the
    share of its KV blocks that requests hold.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MOST_SAMPLES)

    def sample(self, load: "Load") -> None:
        """Take the load of this moment into the averages."""
        self._samples.append(
            (
                load.outstanding_tokens * load.prefill_s_per_token,
                float(load.outstanding_tokens > 0),
                load.used_blocks / load.total_blocks if load.total_blocks else 0.0,
            )
        )

    def read(self) -> dict[str, float]:
        """The averages by name; none of nothing."""
        means = [fmean(column) for column in zip(*self._samples, strict=True)]
        self._samples.clear()
        return dict(zip(("ahead_s", "prefills", "held"), means, strict=False))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a fleet has to do: `waits_s` seconds of prefill, and as much as keeps `busy` replicas
    in use."""

    waits_s: float
    busy: float


def demand(reports: Mapping[str, Mapping[Any, float]]) -> Demand:
    """Of averages by name and replica: those of `Meter`, and `queued_s`, seconds of prefill that
    wait at the routers, which each replica hears of."""
    shares = [reports.get(name, {}) for name in ("prefills", "held")]
    replicas = {replica for share in shares for replica in share}
    return Demand(
        waits_s=sum(reports.get("ahead_s", {}).values())
        + max(reports.get("queued_s", {}).values(), default=0.0),
        busy=sum(max(share.get(replica, 0.0) for share in shares) for replica in replicas),
    )


def wanted(load: Demand, now: int, queue_s: float) -> int:
    """How many replicas there should be where `now` there are. Pure; not less than none."""
    fewest = _needed(load, queue_s, BUSY)
    most = _needed(load, queue_s * MARGIN, BUSY * MARGIN)
    return min(max(now, fewest), most)


def _needed(load: Demand, queue_s: float, busy: float) -> int:
    return max(ceil(load.waits_s / queue_s), ceil(load.busy / busy))


class OutstandingWork:
    """Serve's policy, asked ten times a second. Serve acts on what it has said for long enough."""

    def __init__(self, queue_s: float) -> None:
        self._queue_s = queue_s

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """The number of replicas, between the bounds. Nobody goes before all have reported."""
        reports = context.aggregated_metrics or {}
        target = context.target_num_replicas
        number = wanted(demand(reports), target, self._queue_s)
        heard = reports.get("held", {})
        if not all(replica in heard for replica in context.running_replicas):
            number = max(number, target)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(number, low), high), {}
