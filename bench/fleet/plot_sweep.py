"""All policies under all loads in one picture. matplotlib is imported only to draw."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fleet.plot import blank, save

if TYPE_CHECKING:
    from matplotlib.colors import Normalize

Metrics = Mapping[str, float]
Found = Mapping[str, Mapping[str, Metrics]]  # by load, by policy
WORST = 4.0  # times ours, where the colours end


def plot(path: Path, ours: str, found: Found) -> None:
    """Mean and p99 TTFT over ours, and goodput, a row for each load. Raises PlotError."""
    policies = list(next(iter(found.values())))
    figure = blank(19, 1.8 + 0.3 * len(found))

    def over(metric: str) -> Callable[[Mapping[str, Metrics], str], float]:
        return lambda row, policy: row[policy][metric] / (row[ours][metric] or 1e-9)

    panels: list[tuple[str, Callable[[Mapping[str, Metrics], str], float], str, float, float]] = [
        (f"mean TTFT over {ours}", over("ttft_mean"), "RdBu_r", 1 / WORST, WORST),
        (f"p99 TTFT over {ours}", over("ttft_p99"), "RdBu_r", 1 / WORST, WORST),
        ("first token in time", lambda row, policy: row[policy]["goodput"], "Blues", 0.0, 1.0),
    ]
    axes = figure.subplots(1, len(panels), sharey=True)
    for panel, (title, value, colours, low, high) in zip(axes, panels, strict=True):
        rows = [[value(row, policy) for policy in policies] for row in found.values()]
        panel.set_title(title, fontsize=10, loc="left")
        panel.imshow(rows, aspect="auto", cmap=colours, norm=_norm(low, high))
        panel.set_xticks(range(len(policies)), policies, rotation=40, ha="right", fontsize=8)
        panel.set_yticks(range(len(found)), list(found), fontsize=8)
        panel.tick_params(length=0)
        for y, row in enumerate(rows):
            for x, number in enumerate(row):
                dark = number > 0.6 * high or (low > 0 and number < 1.6 * low)
                text = f"{number:.2f}" if number < 10 else f"{number:.0f}"
                colour = "white" if dark else "black"
                panel.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    save(figure, path)


def _norm(low: float, high: float) -> "Normalize":
    from matplotlib.colors import LogNorm, Normalize

    return LogNorm(low, high) if low > 0 else Normalize(low, high)
