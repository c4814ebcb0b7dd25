"""What `hotbranch up` shows: where to send requests, and what the router says of them."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, NoReturn

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hotbranch.states import in_words

TIMEOUT_S = 2.0
REFRESH_S = 1.0
LINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the router started, over all tenants and replicas."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that replicas did not compute."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        return f"requests={self.requests} errors={self.errors} hit_rate={self.hit_rate:.3f}"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the router sees it, or as the registry does while the router does not."""

    replica_id: str
    address: str
    state: str
    running: int = 0
    waiting: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the router. `replicas` is None when it does not tell us."""

    ready: bool
    counters: Counters
    replicas: Sequence[Replica] | None


def counters(exposition: str) -> Counters:
    """The totals in a router's Prometheus exposition. Errors are what the client did not cause."""
    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = sample.name.removeprefix("hotbranch_").removesuffix("_total")
            if name == "requests" and int(sample.labels["status"]) >= 500:
                totals["errors"] += int(sample.value)
            totals[name] += int(sample.value)
    return Counters(**{field: totals[field] for field in Counters.__dataclass_fields__})


def look(host: str, port: int) -> Snapshot | None:
    """Ask the router how it is; None when it does not answer."""
    try:
        ready, _ = _get(host, port, "/ready")
        _, exposition = _get(host, port, "/metrics")
        status, listing = _get(host, port, "/admin/replicas")
    except (OSError, HTTPException):
        return None
    replicas = None
    if status == 200:
        replicas = [replica(entry) for entry in json.loads(listing)["replicas"]]
    return Snapshot(ready == 200, counters(exposition), replicas)


def replica(entry: Mapping[str, Any]) -> Replica:
    """A replica of the router's listing: what it reports of itself says more than its link."""
    shown = {name: entry[name] for name in Replica.__dataclass_fields__}
    if entry["reported_state"] not in ("", "serving"):
        shown["state"] = in_words(entry["reported_state"])
    return Replica(**shown)


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def sees(host: str, port: int, replicas: int) -> bool:
    """Whether the router is ready, with so many replicas where it tells how many."""
    seen = look(host, port)
    if seen is None or not seen.ready:
        return False
    return seen.replicas is None or sum(one.state == "ready" for one in seen.replicas) >= replicas


def lines(host: str, port: int) -> NoReturn:
    """Print the counters now and then, when they have changed."""
    last = Counters()
    while True:
        time.sleep(LINE_S)
        snapshot = look(host, port)
        if snapshot and snapshot.counters != last:
            last = snapshot.counters
            print(last, flush=True)


def head(out: Console, url: str, model: str, log_dir: str, keyed: bool) -> None:
    """Print what does not change. No frame, no wrapping: the last line is there to be pasted."""
    out.print(f"\n[bold]hotbranch[/] serves [bold]{model}[/] at [bold]{url}/v1[/]\n")
    out.print(f"  metrics   {url}/metrics\n  Ray logs  {log_dir}\n", soft_wrap=True)
    out.print(curl(url, model, keyed), soft_wrap=True, markup=False)
    out.print()


def curl(url: str, model: str, keyed: bool) -> str:
    """A command, on one line, that streams a chat completion."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a radix tree?"}],
        "max_tokens": 100,
        "stream": True,
    }
    key = ' -H "Authorization: Bearer $HOTBRANCH_API_KEY"' if keyed else ""
    kind = "-H 'Content-Type: application/json'"
    return f"curl -N {url}/v1/chat/completions{key} {kind} -d {shlex.quote(json.dumps(body))}"


def live(out: Console, host: str, port: int, heard: Callable[[], Sequence[Replica]]) -> NoReturn:
    """Show what changes. `heard` tells the replicas while the router does not."""
    generated, then = 0, time.monotonic()
    with Live(console=out, auto_refresh=False) as display:
        while True:
            snapshot, now = look(host, port), time.monotonic()
            replicas = snapshot.replicas if snapshot else None
            total = snapshot.counters.generated_tokens if snapshot else 0
            rate = max(0, total - generated) / (now - then)
            generated, then = total, now
            shown = heard() if replicas is None else replicas
            totals = snapshot.counters if snapshot else None
            display.update(_figures(shown, totals, rate), refresh=True)
            time.sleep(REFRESH_S)


def _figures(
    replicas: Sequence[Replica], totals: Counters | None, tokens_per_s: float
) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("replica", "address", "state"):
        table.add_column(column)
    for column in ("running", "waiting", "cached blocks"):
        table.add_column(column, justify="right")
    for replica in replicas:
        table.add_row(
            replica.replica_id,
            replica.address,
            Text(replica.state, "green" if replica.state == "ready" else "yellow"),
            str(replica.running),
            str(replica.waiting),
            f"{replica.cached_blocks} of {replica.total_blocks}",
        )
    if totals is None:
        return Group(table, Text("the router does not answer", "red"))
    line = Text()
    for name, figure, style in (
        ("requests", str(totals.requests), ""),
        ("errors", str(totals.errors), "red" if totals.errors else ""),
        ("hit rate", f"{totals.hit_rate:.1%}", ""),
        ("tokens/s", f"{tokens_per_s:.1f}", ""),
    ):
        line.append(f"{name} ", "dim").append(f"{figure}   ", style)
    return Group(table, Text(), line)
