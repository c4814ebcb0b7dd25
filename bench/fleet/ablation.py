"""What each rule of our policy is worth: `python -m bench fleet --ablate`.

One rule at a time is taken out, all else stays. The last line is JSON: workload, rule, metric.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fleet.load import load, no_renderer
from bench.fleet.main import WIDTH, simulate
from bench.fleet.report import Report
from bench.fleet.traces import TraceError
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import DEFAULT, Profile
from router.fleet import memory, outstanding
from router.schedule import branch_queue, scheduler, shares
from router.schedule.policies import hotbranch, pace

MOONCAKE = "mooncake-fast25/{}_trace.jsonl"
LOADS: Mapping[str, Mapping[str, Any]] = {
    "conversation_x3.4": {"trace": MOONCAKE.format("conversation"), "speed": 3.4, "requests": 4000},
    "synthetic_x6": {"trace": MOONCAKE.format("synthetic"), "speed": 6.0, "requests": 3000},
    "rag": {"trace": "shape:rag", "requests": 4000},
    "agents": {"trace": "shape:agents", "requests": 4000},
    "unique": {"trace": "shape:unique", "requests": 4000},
}


@dataclass(frozen=True, slots=True)
class Without:
    """A rule that is taken out: constants that change, as (module, name, value), and settings."""

    constants: tuple[tuple[Any, str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


RULES: Mapping[str, Without] = {
    "all rules": Without(),
    "work costs nothing (price 0)": Without(((pace, "FACTOR", 0.0), (pace, "LEAST", 0.0))),
    "work costs the same at any load (price 3)": Without(
        ((pace, "FACTOR", 1e9), (pace, "DEAREST", 3.0))
    ),
    "no crowd": Without(((hotbranch, "CROWD", 0.0),)),
    "rendezvous tolerates nothing": Without(((hotbranch, "TOLERANCE", 0.0),)),
    "how fast caches are replaced is not looked at": Without(((hotbranch, "SHORTER", inf),)),
    "little matches count": Without(((hotbranch, "LITTLE", 0.0),)),
    "how far it has come is not read from reports": Without(((outstanding, "CROSSING", 1 << 30),)),
    "how full caches are is not looked at": Without(((memory, "FULL", inf),)),
    "what those that wait will bring is not looked at": Without(
        ((branch_queue, "_common", lambda *known: known[2] - 1),)
    ),
    "no stealing": Without(((scheduler, "LOOKED_AT", 0),)),
    "tenants are not held to their shares": Without(((shares, "OVER", inf),)),
    "by arrival at the router": Without(settings={"order": "arrival"}),
    "by arrival at the replica": Without(settings={"admission": "fcfs"}),
    "window of 8 chunks": Without(settings={"window": 8.0}),
    "nothing waits at the router": Without(settings={"window": 1e9}),
}


def main(traces: Path | None) -> int:
    """Prints a table for each load, and JSON as the last line. Exit status 2 for a bad trace."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    profile, console = Profile.load(DEFAULT), Console(width=WIDTH, stderr=True)
    for name, given in LOADS.items():
        if not given["trace"].startswith("shape:"):
            path = traces / given["trace"] if traces else None
            if path is None or not path.exists():
                print(f"{name}: left out, TRACES has no {given['trace']}", file=sys.stderr)
                continue
            given = {**given, "trace": str(path)}
        try:
            found[name] = dict(_ablated(given, profile))
        except TraceError as error:
            print(f"python -m bench fleet: {error}", file=sys.stderr)
            return 2
        console.print(_table(name, found[name]))
    print(json.dumps(found))
    return 0


def _ablated(given: Mapping[str, Any], profile: Profile) -> Iterator[tuple[str, dict[str, float]]]:
    for rule, without in RULES.items():
        settings = SimulateSettings.model_validate({**given, **without.settings})
        with _changed(without):
            played = load(settings, no_renderer, profile.kv_tokens)
            yield rule, _figures(simulate(settings, profile, played, "hotbranch").report)


@contextmanager
def _changed(without: Without) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in without.constants]
    for module, name, value in without.constants:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _figures(report: Report) -> dict[str, float]:
    return {
        "ttft_mean": report.ttft.mean,
        "ttft_p99": report.ttft.p99,
        "goodput": report.good,
        "hit_rate": report.delivered_hit_rate,
        "imbalance": report.imbalance,
    }


def _table(name: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("without", "mean TTFT, s", "p99", "goodput", "hit", "imbalance", title=name)
    for rule, one in found.items():
        table.add_row(
            rule,
            f"{one['ttft_mean']:.4g}",
            f"{one['ttft_p99']:.3g}",
            f"{one['goodput']:.3f}",
            f"{one['hit_rate']:.3f}",
            f"{one['imbalance']:.2f}",
        )
    return table
