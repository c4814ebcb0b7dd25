"""Figures over load in one picture, a line for each order. matplotlib is imported only to draw."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fleet.plot import COLOURS, blank, save
from router.schedule.branch_queue import Order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.fleet.over_load import Figures

Panel = tuple[str, Callable[["Figures"], float]]
PANELS: Sequence[Panel] = (
    ("hit rate", lambda one: one.hit_rate),
    ("first token in time, requests/s", lambda one: one.goodput),
    ("output, tokens/s", lambda one: one.output_tokens_per_s),
)


def plot(path: Path, title: str, found: Mapping[Order, Sequence["Figures"]]) -> None:
    """Raises PlotError."""
    figure = blank(14, 4, title)
    axes = figure.subplots(1, len(PANELS) + 1)
    for panel, (name, value) in zip(axes, PANELS, strict=False):
        _lines(panel, found, value, "-", labels=panel is axes[0])
        _dress(panel, name)
        panel.set_ylim(bottom=0)
    _lines(axes[-1], found, lambda one: one.ttft_mean, "-")
    _lines(axes[-1], found, lambda one: one.ttft_p99, "--")
    axes[-1].set_yscale("log")
    axes[-1].yaxis.set_major_formatter("{x:g}")
    _dress(axes[-1], "first token, s (dashed: p99)")
    axes[0].legend(fontsize=8, frameon=False, loc="best")
    save(figure, path)


def _lines(
    axes: "Axes",
    found: Mapping[Order, Sequence["Figures"]],
    value: Callable[["Figures"], float],
    style: str,
    labels: bool = False,
) -> None:
    for colour, (order, points) in zip(COLOURS, found.items(), strict=False):
        axes.plot(
            [one.load for one in points],
            [value(one) for one in points],
            color=colour,
            linestyle=style,
            marker="o",
            markersize=3.5,
            label=order.replace("_", " ") if labels else None,
        )


def _dress(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("requests/s that arrive", fontsize=9)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
