"""Policies compared in one picture. matplotlib is imported only to draw."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fleet.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":")  # once the colours are used up
FIRST_S = 1e-3  # the least on the axis of times


class PlotError(Exception):
    """Nothing was drawn; the message is one line for the user."""


def check() -> None:
    """Before long work. Raises PlotError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("--plot needs matplotlib: pip install 'hotbranch[simulate]'") from None


def blank(width: float, height: float, title: str = "") -> "Figure":
    """Sizes in inches. Raises PlotError."""
    check()
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its fonts
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Raises PlotError."""
    try:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from None


def plot(
    path: Path, title: str, reports: Sequence[Report], times: Sequence[Sequence[float]]
) -> None:
    """`times` are the seconds to the first token by report. Raises PlotError."""
    height = max(4.2, 1.8 + 0.34 * len(reports))
    figure = blank(12.5, height, title)
    grid = figure.add_gridspec(1, 4, width_ratios=(2.3, 1, 1, 1))
    _distribution(figure.add_subplot(grid[0]), reports, times)
    ideal = reports[0].ideal_hit_rate
    bars = figure.add_subplot(grid[1])
    _bars(bars, "hit rate", reports, lambda report: report.delivered_hit_rate, "{:.1%}", ideal)
    bars.axvline(ideal, color="#555555", linewidth=1, linestyle=":")
    bars.set_xlabel(f"dotted: ideal, {ideal:.1%}", fontsize=8, color="#555555", loc="left")
    bars = figure.add_subplot(grid[2], sharey=bars)
    _bars(bars, "first token in time", reports, lambda report: report.good, "{:.1%}", 1.0)
    bars.set_xlabel(
        r"$\leq$ 1 s, or 3 $\times$ its prefill", fontsize=8, color="#555555", loc="left"
    )
    bars = figure.add_subplot(grid[3], sharey=bars)
    _bars(bars, "imbalance of prefill", reports, lambda report: report.imbalance, "{:.2f}", 1.0)
    bars.axvline(1.0, color="#555555", linewidth=1, linestyle=":")
    bars.set_xlabel("busiest replica over the mean", fontsize=8, color="#555555", loc="left")
    save(figure, path)


def _distribution(
    axes: "Axes", reports: Sequence[Report], times: Sequence[Sequence[float]]
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for i, (report, unordered) in enumerate(zip(reports, times, strict=True)):
        ordered = sorted(max(FIRST_S, time) for time in unordered)
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        style = DASHES[i // len(COLOURS) % len(DASHES)]
        axes.step(
            ordered, shares, where="post", color=_colour(i), linestyle=style, label=report.policy
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1)
    axes.set_title("time to the first token, share of requests", fontsize=10, loc="left")
    axes.set_xlabel("seconds", fontsize=9)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    if len(reports) > 1:
        axes.legend(fontsize=8, frameon=False, loc="best")


def _bars(
    axes: "Axes",
    title: str,
    reports: Sequence[Report],
    value: Callable[[Report], float],
    form: str,
    least: float,
) -> None:
    """Horizontal, the first policy on top. The axis reaches `least` at least."""
    values = [value(report) for report in reports]
    places = range(len(reports))
    axes.barh(places, values, color=[_colour(i) for i in places], height=0.68)
    end = max(*values, least) * 1.36  # the figures stand in a column, clear of bars and lines
    for place, shown in zip(places, values, strict=True):
        axes.text(end, place, form.format(shown), fontsize=8, ha="right", va="center")
    axes.set_xlim(0, end)
    axes.set_ylim(len(reports) - 0.4, -0.6)
    axes.set_yticks(places, [report.policy for report in reports], fontsize=8)
    if title != "hit rate":  # the names stand beside the first ones
        axes.tick_params(labelleft=False)
    axes.set_xticks([])
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
