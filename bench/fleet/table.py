"""Reports side by side, for a terminal."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from bench.fleet.report import Report

WIDE = 124  # characters of a line with all columns
COLUMNS: Mapping[str, Callable[[Report], str]] = {
    "policy": lambda report: report.policy + (f" ({report.failed} failed)" * (report.failed > 0)),
    "hit": lambda report: f"{report.delivered_hit_rate:.3f}",
    "TTFT": lambda report: _seconds(report.ttft.mean),
    "p50": lambda report: _seconds(report.ttft.p50),
    "p99": lambda report: _seconds(report.ttft.p99),
    "ms/token": lambda report: f"{report.inter_token.mean * 1000:.1f}",
    " p50": lambda report: f"{report.inter_token.p50 * 1000:.1f}",
    " p99": lambda report: f"{report.inter_token.p99 * 1000:.1f}",
    "stall": lambda report: f"{report.stall_p99 * 1000:.0f}",
    "good": lambda report: f"{report.good:.1%}",
    "good/s": lambda report: f"{report.goodput:.2f}",
    "tokens/s": lambda report: f"{report.output_tokens_per_s:,.0f}",
    "imbalance": lambda report: f"{report.imbalance:.2f}",
    "fair": lambda report: f"{report.fairness:.3f}",
}
NARROW = ("policy", "hit", "TTFT", "p50", "p99", "ms/token", "good", "tokens/s", "imbalance")


def table(title: str, reports: Sequence[Report], width: int) -> Table:
    """A line for each policy: first tokens in seconds, the time from one token to the next and the
    99th percentile of its longest in milliseconds. Where the line is short, what matters most."""
    ideal = reports[0].ideal_hit_rate
    shown = Table(
        title=f"{title}\nideal hit rate {ideal:.3f}", title_justify="left", title_style="", box=None
    )
    columns = COLUMNS if width >= WIDE else NARROW
    for name in columns:
        shown.add_column(name.strip(), justify="left" if name == "policy" else "right")
    for report in reports:
        shown.add_row(*(COLUMNS[name](report) for name in columns))
    return shown


def _seconds(time: float) -> str:
    return f"{time:.3f}" if time < 10 else f"{time:.1f}"
