"""Progress of long work: a bar on a terminal, one plain line a stage elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

Report = Callable[[str, float], None]  # (what is being done, share of it that is done, 0..1)


@contextmanager
def shown(stream: TextIO) -> Iterator[Report]:
    """A Report that writes to `stream`; nothing is written until it is called."""
    if not stream.isatty():
        yield _plain(stream)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    task = bar.add_task("", total=1.0)

    def report(stage: str, share: float) -> None:
        bar.start()
        bar.update(task, description=stage, completed=share)

    try:
        yield report
    finally:
        bar.stop()


def _plain(stream: TextIO) -> Report:
    current = ""

    def report(stage: str, share: float) -> None:
        nonlocal current
        if stage != current:
            current = stage
            print(stage, file=stream, flush=True)

    return report
