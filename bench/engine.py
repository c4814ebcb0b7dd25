"""The engine beside vLLM: `python -m bench engine`.

Same model, same token ids, same room for KV, two threads each, in turn. Without the peer (`make
peers`) the ratios are left out. `--device cuda` runs Llama-3.1-8B with random weights beside a
timing model of an H100 instead. The last line is JSON.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from bench.engine_h100 import decode_rate, prefill_rate
from bench.engine_points import FULL, POOL, QUICK, RUNNING, Bench, Point
from bench.engines.side import ROOT, Side
from hotbranch.embedded import resolve_model
from hotbranch.settings import EngineSettings
from replicas.radix.runner import cpu_has_bfloat16

PEER = ROOT / ".venv-vllm/bin/python"
THREADS = 2
BATCHES = (1, 8)
CONTEXTS = (64, 1000)
PROMPTS = (200, 1000, 3000)

BEGAN = time.perf_counter()

Measure = Callable[[Bench], Point]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure of a point should keep to. Without the figure, as without vLLM, it holds."""

    key: str
    least: float = -inf
    most: float = inf

    def broken(self, point: Point) -> bool:
        return self.key in point and not self.least <= point[self.key] <= self.most

    def __str__(self) -> str:
        return f"{self.key} >= {self.least}" if self.most == inf else f"{self.key} <= {self.most}"


def points() -> dict[str, tuple[Measure, list[Bound]]]:
    """All points in the order in which they are measured."""
    prefill: dict[str, tuple[Measure, list[Bound]]] = {
        f"prefill_{n}": (partial(Bench.prefill, tokens=n), [Bound("ratio", 1.2)]) for n in PROMPTS
    }
    decode: dict[str, tuple[Measure, list[Bound]]] = {
        f"decode_b{b}_ctx{n}": (partial(Bench.decode, batch=b, context=n), [Bound("ratio", 1.5)])
        for b in BATCHES
        for n in CONTEXTS
    }
    return {
        **prefill,
        "gemm_floor": (Bench.products, [Bound("ratio", 0.75)]),
        **decode,
        "rag": (Bench.rag, [Bound("reached", 1.0), Bound("ratio", 1.2)]),
        "voice": (Bench.voice, [Bound("hit_rate", 0.864)]),
        "chat": (Bench.chat, [Bound("default_over_fcfs", 1.29)]),
        "chat_ample": (
            Bench.chat_ample,
            [Bound("ratio_within_noise", 1.0), Bound("noise", most=0.03)],
        ),
        "order": (Bench.order, []),
        "unique": (Bench.unique, [Bound("tree_share", most=0.02)]),
    }


def h100() -> dict[str, float]:
    """What the timing model says of the points that it covers, in tokens a second."""
    return {f"prefill_{n}": prefill_rate(n) for n in PROMPTS} | {
        f"decode_b{b}_ctx{n}": decode_rate(b, n) for b in BATCHES for n in CONTEXTS
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__)
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument(
        "--quick", dest="effort", action="store_const", const=QUICK, help="ten minutes (default)"
    )
    effort.add_argument(
        "--full",
        dest="effort",
        action="store_const",
        const=FULL,
        help="unscaled, every policy: an hour",
    )
    parser.set_defaults(effort=QUICK)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(points()), metavar="POINT")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the JSON there, too")
    return parser.parse_args()


def start_ours(device: str) -> Side:
    command = [sys.executable, "-m", "bench.engines.radix", device, str(POOL), str(THREADS)]
    return Side(command, {"OMP_NUM_THREADS": str(THREADS)})


def start_vllm() -> Side:
    """In the dtype and mode that are fastest on this kind of CPU."""
    settings = EngineSettings()
    _, directory = resolve_model(settings.model, settings.cache_dir)
    environment = {
        # One OpenMP for all its parts, as vLLM arranges for workers that it starts itself.
        "LD_PRELOAD": str(
            next(PEER.parents[1].glob("lib/python3*/site-packages/torch/lib/libgomp*"))
        ),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves it cannot load, and compiles every time
    }
    command = [str(PEER), "-m", "bench.peers.vllm_engine", str(directory), str(POOL), str(RUNNING)]
    dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
    return Side([*command, dtype, "compiled"], environment)


class Others:
    """What the rest of the machine computes: a comparison beside much of it is worthless."""

    def __init__(self, bench: Bench) -> None:
        self._sides = bench.sides()
        self._began, self._used = time.perf_counter(), self._seconds()

    def cpus(self) -> float:
        """Cores that others kept busy, on average."""
        return max(0.0, self._seconds() - self._used) / (time.perf_counter() - self._began)

    def _seconds(self) -> float:
        fields = Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
        user, nice, system, _idle, _wait, irq, soft, _steal = map(int, fields)
        busy = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
        return busy - sum(side.cpu_seconds() for side in self._sides) - time.process_time()


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {line}", flush=True)


def measure(bench: Bench, names: Iterable[str], model: dict[str, float]) -> Iterator[list[str]]:
    """Fill the results, and after each point: its bounds that are not kept, or that no time was
    left for it."""
    for name in names:
        if time.perf_counter() - BEGAN > bench.effort.seconds:
            yield [f"{name}: not measured, the time was over"]
            continue
        how, bounds = points()[name]
        say(name)
        others = Others(bench)
        point = how(bench)
        point["others_cpus"] = others.cpus()
        if name in model:
            point |= {"model": model[name], "ratio": point["ours"] / model[name]}
        bench.results[name] = point
        say("  " + json.dumps(rounded(point)))
        yield [f"{name}: {bound}" for bound in bounds if bound.broken(point)]


def report(bench: Bench, device: str, missed: list[str]) -> dict[str, Any]:
    """All that was measured so far, and with what. On CUDA nothing is a miss."""
    return {
        "device": device,
        "threads": THREADS,
        "text_lengths_divided_by": bench.effort.divisor,
        "rounds": bench.effort.rounds,
        "engine": bench.ours.facts,
        "vllm": bench.vllm.facts if bench.vllm else None,
        "gemm_floor_ratio": rounded(bench.results.get("gemm_floor", {}).get("ratio")),
        "points": rounded(bench.results),
        "missed": [] if device == "cuda" else missed,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    options = arguments()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    effort = options.effort
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the sides end with us
    with ExitStack() as stack:
        say("loading our engine")
        ours = stack.enter_context(closing(start_ours(options.device)))
        vllm = None
        if not cuda and PEER.exists():
            say("loading vLLM, which compiles for a minute or more")
            vllm = stack.enter_context(closing(start_vllm()))
        elif not cuda:
            say("no peer: `make peers` installs it; ratios are left out")
        bench = Bench(ours, vllm, effort, say)
        say("warming up")
        bench.warm_up()
        missed: list[str] = []
        for broken in measure(bench, options.only or points(), h100() if cuda else {}):
            missed += broken
            if options.out:  # a long run that is cut short keeps what it has
                text = json.dumps(report(bench, options.device, missed), indent=2)
                options.out.write_text(f"{text}\n", encoding="utf-8")
        result = report(bench, options.device, missed)
    for bound in result["missed"]:
        print(f"missed: {bound}", file=sys.stderr, flush=True)
    print(json.dumps(result), flush=True)
    return 0
