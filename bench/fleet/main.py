"""`hotbranch simulate`: one load, some policies, what became of it."""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.fleet import plot
from bench.fleet.load import Load, load
from bench.fleet.report import Report, report
from bench.fleet.simulation import Fleet, Simulation
from bench.fleet.table import table
from bench.fleet.traces import TraceError
from hotbranch import embedded, progress
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import Profile, ProfileError
from router.prompt.render import Renderer
from router.schedule.policies import ADMISSION, POLICIES, policy
from router.schedule.scheduler import Rules

TICK_S = 0.1  # between two looks at the progress bar
WIDTH = 132  # of a table that goes to no terminal


class Outcome(NamedTuple):
    """Of one policy. `ttft` is in order of arrival, without what failed; `seconds` it took here."""

    report: Report
    ttft: list[float]
    seconds: float


def run(settings: SimulateSettings) -> int:
    """Exit status 2, and one line, for what the user has to change."""
    try:
        _run(settings)
    except (
        TraceError,
        ProfileError,
        plot.PlotError,
        embedded.ModelError,
        _Wrong,
    ) as error:
        print(f"hotbranch simulate: {error}", file=sys.stderr)
        return 2
    return 0


class _Wrong(Exception):
    """Settings that do not go together, or a file that cannot be written."""


def _run(settings: SimulateSettings) -> None:
    names = _policies(settings.policies)
    profile = Profile.load(settings.profile)
    if settings.plot:
        plot.check()
    for file in filter(None, (settings.plot, settings.json_file)):
        if not file.parent.is_dir():
            raise _Wrong(f"{file}: no such directory: {file.parent}")
    played = load(settings, partial(_renderer, settings), profile.kv_tokens)
    outcomes = simulations(settings, profile, played, names)
    reports = [outcome.report for outcome in outcomes]
    title = (
        f"{played.name}: {len(played.ideal):,} requests on {settings.replicas} replicas"
        + (f" at {settings.speed:g}x" if settings.speed != 1 else "")
        + f", {Path(settings.profile).name.removesuffix('.yaml')}"
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table(title, reports, console.width))
    try:
        if settings.json_file:
            text = json.dumps(_document(settings, played, profile, reports), indent=1)
            settings.json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _Wrong(f"{settings.json_file}: {error.strerror}") from None
    if settings.plot:
        plot.plot(settings.plot, title, reports, [outcome.ttft for outcome in outcomes])


def simulate(
    settings: SimulateSettings,
    profile: Profile,
    played: Load,
    name: str,
    ended: Callable[[], None] = lambda: None,
) -> Outcome:
    """One policy. The same for the same arguments but for `seconds`."""
    began = time.perf_counter()
    fleet = Fleet(
        replicas=settings.replicas,
        profile=profile,
        block_size=played.block_size,
        admission=ADMISSION[name] if settings.admission == "auto" else settings.admission,
        rules=Rules(
            window=settings.window, starvation_s=settings.starvation_s, order=settings.order
        ),
        starvation_s=settings.starvation_s,
        routers=settings.routers,
        report_s=settings.report_s,
    )
    simulation = Simulation(fleet, partial(policy, name, settings.seed))
    served = simulation.run(played.play(), ended)
    found = report(name, served, played.ideal, profile, settings.replicas)
    ttft = [one.ttft for one in served if one.first >= 0]
    return Outcome(found, ttft, time.perf_counter() - began)


def _policies(given: Sequence[str]) -> list[str]:
    names = list(POLICIES) if "all" in given else list(dict.fromkeys(given)) or ["hotbranch"]
    for name in names:
        if name not in POLICIES:
            raise _Wrong(f"no policy {name!r}: {', '.join(POLICIES)}, or all")
    return names


def _renderer(settings: SimulateSettings) -> Renderer:
    with progress.shown(sys.stderr) as shown:
        _, directory = embedded.resolve_model(settings.model, settings.cache_dir, shown)
    try:
        return Renderer.load(directory)
    except (OSError, ValueError) as error:
        raise _Wrong(f"model directory {directory}: {error}") from None


def simulations(
    settings: SimulateSettings, profile: Profile, played: Load, names: Sequence[str]
) -> list[Outcome]:
    """Of the policies by their names, in that order; progress on a terminal."""
    requests = len(played.ideal)
    jobs = min(settings.jobs, len(names))
    with _bar(requests * len(names)) as advance:
        if jobs == 1:
            return [
                simulate(settings, profile, played, name, partial(advance, 1, name))
                for name in names
            ]
        # By fork: the load is there already, and need not be pickled.
        context = multiprocessing.get_context("fork")
        work = partial(simulate, settings, profile, played)
        outcomes = []
        with context.Pool(jobs, _begin, (work,)) as pool:  # leaving it ends the processes
            for outcome in pool.imap(_work, names, chunksize=1):
                outcomes.append(outcome)
                advance(requests, outcome.report.policy)
        return outcomes


_inherited: list[Callable[[str], Outcome]] = []  # by a process of the pool


def _begin(work: Callable[[str], Outcome]) -> None:
    """The parent gets Ctrl-C as well, and ends the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _inherited.append(work)


def _work(name: str) -> Outcome:
    return _inherited[0](name)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """Counts requests on a terminal's stderr; elsewhere nothing is shown."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("simulating", total=total)
    counted, shown = 0, 0.0

    def advance(more: int, name: str) -> None:
        nonlocal counted, shown
        counted += more
        if (now := time.monotonic()) - shown >= TICK_S:
            bar.update(task, description=name, completed=counted)
            shown = now

    with bar:
        yield advance


def _document(
    settings: SimulateSettings, played: Load, profile: Profile, reports: Sequence[Report]
) -> dict[str, object]:
    """The results and what brings them back."""
    return {
        "trace": settings.trace,
        "requests": len(played.ideal),
        "replicas": settings.replicas,
        "routers": settings.routers,
        "report_s": settings.report_s,
        "speed": settings.speed,
        "seed": settings.seed,
        "block_size": played.block_size,
        "profile": {"name": settings.profile, **profile.model_dump()},
        "rules": {
            "window": settings.window,
            "starvation_s": settings.starvation_s,
            "order": settings.order,
            "admission": settings.admission,
        },
        "policies": [asdict(report) for report in reports],
    }
