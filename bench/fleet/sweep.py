"""Every policy under every load: `python -m bench fleet`.

Eight simulated replicas, each policy with the engine order of the system that it comes from. Traces
are read from the folder that TRACES names; without them only loads that are made up are played. The
last line is JSON: workload, policy, metric.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.fleet import ablation, over_load, plot_sweep, real_time
from bench.fleet.fairness import CROWDS, fairness
from bench.fleet.fairness import missed as unfair
from bench.fleet.load import load, no_renderer
from bench.fleet.main import Outcome, simulations
from bench.fleet.plot import PlotError, check
from bench.fleet.report import Report
from bench.fleet.routers import Routers, routers
from bench.fleet.routers import missed as scattered
from bench.fleet.scheduling import scheduling_us
from bench.fleet.shapes import SHAPES
from bench.fleet.texts import TAU
from bench.fleet.traces import TraceError
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import DEFAULT, Profile
from router.schedule.policies import POLICIES

OURS = "hotbranch"
PROFILES = {"": DEFAULT, "_slow": f"{DEFAULT}-slow"}  # by what their workloads end with
MOONCAKE = "mooncake-fast25/{}_trace.jsonl"
SATURATED = ("conversation_x3.4", "synthetic_x6")
SATURATED_PEERS = ("sglang_threshold", "dynamo_linear", "llm_d")
MEAN_TTFT = 0.35  # of the best of these
CLEARLY = 0.03
GOODPUT, UNIQUE = 0.01, 0.02
PLACED_US = 200.0

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Point:
    """A workload. `trace` is as `hotbranch simulate` takes it, a file being below TRACES."""

    name: str
    trace: str
    speed: float = 1.0
    requests: int = 0

    def where(self, traces: Path | None) -> str | None:
        """What to simulate; None where it is not there."""
        kind, colon, name = self.trace.rpartition(":")
        if kind == "shape":
            return self.trace
        path = traces / name if traces else None
        return f"{kind}{colon}{path}" if path and path.exists() else None


def _trace(name: str, speeds: tuple[float, ...], requests: int = 0) -> list[Point]:
    return [Point(f"{name}_x{s:g}", MOONCAKE.format(name), s, requests) for s in speeds]


QUICK = [
    *_trace("conversation", (3, 3.4), 4000),
    *_trace("synthetic", (6,), 3000),
    Point("rag", "shape:rag", requests=2000),
    Point("unique", "shape:unique", requests=2000),
]
SHARED = [
    *_trace("conversation", (3,), 4000),
    Point("rag", "shape:rag", requests=2000),
    Point("chat", "shape:chat", requests=2000),
]
FULL = [
    *_trace("conversation", (1, 2, 3, 3.4, 4)),
    *_trace("synthetic", (1, 3, 6)),
    Point("tau-bench", f"tau-bench:tau-bench/{TAU}"),
    Point("bfcl-live", "bfcl-live:bfcl"),
    Point("bfcl-turns", "bfcl-turns:bfcl"),
    *(Point(name, f"shape:{name}") for name in SHAPES),
]


def main() -> int:
    """Exit status 1 where an aim was missed, 2 for a trace that cannot be read."""
    if "--real-time" in sys.argv[1:]:  # it has flags of its own
        return real_time.main([given for given in sys.argv[1:] if given != "--real-time"])
    arguments = _arguments()
    given = os.environ.get("TRACES")
    traces = Path(given) if given else None
    if arguments.orders:
        return over_load.main(traces, arguments.plot)
    if arguments.ablate:
        return ablation.main(traces)
    try:
        return _sweep(arguments, traces)
    except (TraceError, PlotError) as error:
        print(f"python -m bench fleet: {error}", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="ten minutes (default)")
    mode.add_argument("--full", action="store_true", help="all workloads, whole, two profiles")
    mode.add_argument(
        "--real-time", action="store_true", help="instead: the router as it runs, and virtual time"
    )
    mode.add_argument(
        "--orders", action="store_true", help="instead: depth first beside arrival, over load"
    )
    mode.add_argument(
        "--ablate", action="store_true", help="instead: ours without one rule at a time"
    )
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="as the JSON names them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write there too; what is in it is not redone"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of it: .png or .svg")
    arguments = parser.parse_args()
    if arguments.plot and arguments.plot.suffix not in (".png", ".svg"):
        parser.error("--plot wants a file that ends in .png or .svg")
    if arguments.plot and arguments.ablate:
        parser.error("--ablate prints tables, no picture")
    names = [name for name, _, _ in _workloads(arguments.full)]
    if unknown := set(arguments.only or ()) - {*names}:
        parser.error(f"no workload {min(unknown)!r}: {', '.join(names)}")
    return arguments


def _workloads(full: bool) -> list[tuple[str, Point, str]]:
    """By name, each with its profile."""
    points, profiles = (FULL, PROFILES) if full else (QUICK, {"": DEFAULT})
    return [
        (point.name + end, point, profile) for end, profile in profiles.items() for point in points
    ]


def _sweep(arguments: argparse.Namespace, traces: Path | None) -> int:
    """Raises TraceError and PlotError."""
    if arguments.plot:
        check()
    found: dict[str, dict[str, Metrics]] = {}
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))["workloads"]
    for name, point, profile in _workloads(arguments.full):
        if name in found or (arguments.only and name not in arguments.only):
            continue
        trace = point.where(traces)
        if trace is None:
            print(f"{name}: left out, TRACES has no {point.trace}", file=sys.stderr)
            continue
        print(name, file=sys.stderr, flush=True)
        found[name] = dict(_point(point, trace, profile, arguments.jobs))
        if arguments.out:
            _write(arguments.out, {"workloads": found})
    result = _judged(found, traces, arguments.only)
    if arguments.out:
        _write(arguments.out, result)
    if arguments.plot and found:
        plot_sweep.plot(arguments.plot, OURS, found)
    for line in result["missed"]:
        print(f"missed: {line}", file=sys.stderr)
    print(json.dumps(result))
    return 1 if result["missed"] else 0


def _judged(
    found: dict[str, dict[str, Metrics]], traces: Path | None, only: list[str] | None
) -> dict[str, Any]:
    """With what is measured besides the workloads, unless only some of these were asked for."""
    placed_us = scheduling_us()
    fair = {} if only else {name: fairness(crowd) for name, crowd in CROWDS.items()}
    shared = {} if only else dict(_shared(traces))
    return {
        "replicas": SimulateSettings().replicas,
        "workloads": found,
        "scheduling_us_p50": placed_us,
        "fairness": {name: asdict(one) for name, one in fair.items()},
        "routers": {name: asdict(one) for name, one in shared.items()},
        "missed": [*_missed(found, placed_us), *unfair(fair), *scattered(shared)],
    }


def _point(point: Point, trace: str, profile: str, jobs: int) -> Iterator[tuple[str, Metrics]]:
    settings = SimulateSettings(
        trace=trace, speed=point.speed, requests=point.requests, profile=profile, jobs=jobs
    )
    timing = Profile.load(profile)
    played = load(settings, no_renderer, timing.kv_tokens)
    for outcome in simulations(settings, timing, played, list(POLICIES)):
        yield outcome.report.policy, _metrics(outcome)


def _shared(traces: Path | None) -> Iterator[tuple[str, Routers]]:
    """Many routers under some of the loads."""
    timing, replicas = Profile.load(DEFAULT), SimulateSettings().replicas
    for point in SHARED:
        if (trace := point.where(traces)) is not None:
            settings = SimulateSettings(trace=trace, speed=point.speed, requests=point.requests)
            played = load(settings, no_renderer, timing.kv_tokens)
            yield point.name, routers(played, timing, replicas)


def _metrics(outcome: Outcome) -> Metrics:
    found: Report = outcome.report
    print(
        f"  {found.policy:24} ttft {found.ttft.mean:7.3f} {found.ttft.p99:7.2f}"
        f"  good {found.good:.3f}  hit {found.delivered_hit_rate:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return {
        "ttft_mean": found.ttft.mean,
        "ttft_p99": found.ttft.p99,
        "itl_mean": found.inter_token.mean,
        "goodput": found.good,
        "hit_rate": found.delivered_hit_rate,
        "imbalance": found.imbalance,
        "failed": found.failed,
    }


def _missed(found: Mapping[str, Mapping[str, Metrics]], placed_us: float) -> Iterator[str]:
    """The aims that do not hold, in words."""
    for name, policies in found.items():
        ours = policies[OURS]
        others = {policy: them for policy, them in policies.items() if policy != OURS}
        for policy, them in others.items():
            if ours["goodput"] < them["goodput"] - GOODPUT:
                yield f"{name}: goodput {ours['goodput']:.3f}, {policy} {them['goodput']:.3f}"
            if _dominates(them, ours):
                yield f"{name}: {policy} dominates in TTFT"
        if name.removesuffix("_slow") in SATURATED:
            best = min((others[p] for p in SATURATED_PEERS), key=lambda m: m["ttft_mean"])
            ratio = ours["ttft_mean"] / best["ttft_mean"]
            if ratio > MEAN_TTFT or ours["ttft_p99"] > best["ttft_p99"]:
                yield f"{name}: mean TTFT {ratio:.3f} of the best of {', '.join(SATURATED_PEERS)}"
        if name.removesuffix("_slow") == "unique":
            ratio = ours["ttft_mean"] / policies["least_load"]["ttft_mean"]
            if ratio > 1 + UNIQUE:
                yield f"{name}: mean TTFT {ratio:.3f} of least_load's"
    if placed_us > PLACED_US:
        yield f"placing and queueing takes {placed_us:.0f} us"


def _dominates(them: Metrics, ours: Metrics) -> bool:
    """Clearly better in mean or p99 TTFT, without being clearly worse in the other."""
    ratios = [them[metric] / (ours[metric] or 1e-9) for metric in ("ttft_mean", "ttft_p99")]
    return min(ratios) < 1 - CLEARLY and max(ratios) <= 1 + CLEARLY


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
