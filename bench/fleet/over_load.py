"""The order of the queues at the router, depth first or by arrival, from idle to saturated.

All else is equal: placement, the window, the starvation bound, and the order in which an engine
admits what it was sent (`ADMISSION`).
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from bench.fleet import plot_load
from bench.fleet.load import load, no_renderer
from bench.fleet.main import WIDTH, Outcome, simulate
from bench.fleet.plot import PlotError, check
from bench.fleet.traces import TraceError
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import Profile
from router.schedule.branch_queue import Order
from router.schedule.policies import ADMISSION as ADMISSIONS

POLICY = "hotbranch"
ADMISSION = ADMISSIONS[POLICY]
ORDERS: tuple[Order, ...] = get_args(Order)
TRACE = "mooncake-fast25/conversation_trace.jsonl"
SPEEDS = (1, 2, 3, 3.5, 4, 5, 6)
SHAPE = "shape:agents"
RATES = (2, 8, 16, 32, 48, 64, 96)  # requests a second and replica
REQUESTS = 4000


@dataclass(frozen=True, slots=True)
class Figures:
    """One order under one load. `load` are requests a second that arrive, `goodput` those a second
    whose first token came in time; first tokens in seconds."""

    load: float
    hit_rate: float
    goodput: float
    output_tokens_per_s: float
    ttft_mean: float
    ttft_p99: float


Orders = Mapping[Order, Sequence[Figures]]  # each by load, least first


def main(traces: Path | None, picture: Path | None) -> int:
    """Prints a table, and JSON as the last line. Exit status 2 for what the user has to change."""
    try:
        _run(traces, REQUESTS, picture)
    except (TraceError, PlotError) as error:
        print(f"python -m bench fleet: {error}", file=sys.stderr)
        return 2
    return 0


def _run(traces: Path | None, requests: int, picture: Path | None) -> None:
    if picture:
        check()
    points = list(_points(traces, requests))
    found = {order: [figures(point, order) for point in points] for order in ORDERS}
    title = (
        f"{Path(points[0].trace).stem}: {requests:,} requests on {points[0].replicas} replicas"
        f" that admit {ADMISSION.replace('_', ' ')} first"
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(title, highlight=False)
    console.print(table(found))
    if picture:
        plot_load.plot(picture, title, found)
    print(
        json.dumps(
            {
                "trace": points[0].trace,
                "requests": requests,
                "replicas": points[0].replicas,
                "admission": ADMISSION,
                "orders": {order: [asdict(one) for one in them] for order, them in found.items()},
            }
        )
    )


def _points(traces: Path | None, requests: int) -> Iterator[SimulateSettings]:
    """The trace, faster and faster; without it a shape, at higher and higher rates."""
    path = traces / TRACE if traces else None
    if path and path.exists():
        for speed in SPEEDS:
            yield SimulateSettings(trace=str(path), requests=requests, speed=speed)
        return
    for rate in RATES:
        each = SimulateSettings(trace=SHAPE, requests=requests)
        yield each.model_copy(update={"rate": rate * each.replicas})


def figures(settings: SimulateSettings, order: Order) -> Figures:
    settings = settings.model_copy(update={"order": order, "admission": ADMISSION})
    profile = Profile.load(settings.profile)
    played = load(settings, no_renderer, profile.kv_tokens)
    outcome: Outcome = simulate(settings, profile, played, POLICY)
    found, last = outcome.report, max(arrival.at for arrival in played.play())
    return Figures(
        load=found.requests / last,
        hit_rate=found.delivered_hit_rate,
        goodput=found.goodput,
        output_tokens_per_s=found.output_tokens_per_s,
        ttft_mean=found.ttft.mean,
        ttft_p99=found.ttft.p99,
    )


def table(found: Orders) -> Table:
    """A line for each load and order."""
    shown = Table(box=None)
    shown.add_column("requests/s", justify="right")
    shown.add_column("order")
    for name in ("hit", "good/s", "tokens/s", "TTFT", "p99"):
        shown.add_column(name, justify="right")
    for at in range(len(found[ORDERS[0]])):
        for order in ORDERS:
            one = found[order][at]
            shown.add_row(
                f"{one.load:.1f}" if order == ORDERS[0] else "",
                order.replace("_", " "),
                f"{one.hit_rate:.3f}",
                f"{one.goodput:.2f}",
                f"{one.output_tokens_per_s:,.0f}",
                f"{one.ttft_mean:.3f}",
                f"{one.ttft_p99:.2f}",
            )
    return shown
