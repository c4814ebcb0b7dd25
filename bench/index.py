"""The index, beside NVIDIA Dynamo's: `python -m bench index`.

A decision is what a router does with a tokenised prompt: token ids to block keys to the depth that
each replica holds. The workload is `bench.index_workload`; both sides take turns in one run.
Without the peer (`make peers`) the ratios are left out. The last line is JSON.
"""

import json
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.index_workload import BLOCK, BLOCKS, REPLICAS, percentile, sequences
from hotbranch.keys import block_keys, root
from router.index.chains import KeyChains
from router.index.index import Index

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-dynamo/bin/python"
ROUNDS = 5
SEED = root("bench")
MILLION = 1_000_000


def filled(prompts: Sequence[bytes], replicas: int) -> Index:
    """An index in which prompt i is held by replica i modulo `replicas`."""
    index = Index()
    for replica in range(replicas):
        index.add(str(replica))
    for i, prompt in enumerate(prompts):
        index.store(str(i % replicas), SEED, block_keys(prompt, BLOCK, SEED))
    return index


def times(work: Callable[[bytes], object], prompts: Sequence[bytes]) -> list[float]:
    """Seconds of each call."""
    took = []
    for prompt in prompts:
        began = time.perf_counter()
        work(prompt)
        took.append(time.perf_counter() - began)
    return took


def decide(index: Index) -> Callable[[bytes], object]:
    return lambda prompt: index.match(block_keys(prompt, BLOCK, SEED))


def decide_seen(index: Index, chains: KeyChains) -> Callable[[bytes], object]:
    return lambda prompt: index.match(chains.keys(prompt, BLOCK, SEED))


def store_rate(chains: Sequence[Sequence[int]]) -> float:
    index = filled([], REPLICAS)
    began = time.perf_counter()
    for i, keys in enumerate(chains):
        index.store(str(i % REPLICAS), SEED, keys)
    return sum(map(len, chains)) / (time.perf_counter() - began)


def evict_rate(prompts: Sequence[bytes], chains: Sequence[Sequence[int]]) -> float:
    index = filled(prompts, REPLICAS)
    began = time.perf_counter()
    for i, keys in enumerate(chains):
        index.evict(str(i % REPLICAS), keys[::-1])
    return sum(map(len, chains)) / (time.perf_counter() - began)


def bytes_per_block() -> float:
    """Of a million blocks as they come from reports: every key an integer of its own."""
    chain = array("Q", range(1 << 60, (1 << 60) + MILLION * 7, 7))
    index = filled([], REPLICAS)
    tracemalloc.start()
    for i in range(0, MILLION, BLOCKS):
        index.store(str(i // BLOCKS % REPLICAS), SEED, chain[i : i + BLOCKS].tolist())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / index.blocks


class Peer:
    """Dynamo in its own process; one command at a time."""

    def __init__(self) -> None:
        command = [str(PEER), "-m", "bench.peers.dynamo_index"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        print(command, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def compare(report: dict[str, Any], prompts: Sequence[bytes]) -> None:
    """Ours and the peer's, in turn; the median round of each."""
    peer = Peer() if PEER.exists() else None
    chains = [block_keys(prompt, BLOCK, SEED) for prompt in prompts]
    index, seen = filled(prompts, REPLICAS), KeyChains(1 << 16)
    rounds: dict[str, list[float]] = {}

    def note(**figures: float) -> None:
        for name, figure in figures.items():
            rounds.setdefault(name, []).append(figure)

    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", flush=True)
        note(store_blocks_per_s=store_rate(chains), evict_blocks_per_s=evict_rate(prompts, chains))
        if peer:
            note(dynamo_store_blocks_per_s=peer.ask("store")["blocks_per_s"])
        took = times(decide(index), prompts)
        note(decision_us_p50=percentile(took, 0.5), decision_us_p99=percentile(took, 0.99))
        if peer:
            answer = peer.ask("decide")
            note(dynamo_us_p50=answer["p50"], dynamo_us_p99=answer["p99"])
        times(decide_seen(index, seen), prompts)
        took = times(decide_seen(index, seen), prompts)
        note(seen_prefix_us_p50=percentile(took, 0.5))
        note(match_us_p50=percentile(_match_times(index, chains), 0.5))
    report |= {name: sorted(figures)[ROUNDS // 2] for name, figures in rounds.items()}
    if peer:
        peer.close()
        report["decision_ratio"] = report["decision_us_p50"] / report["dynamo_us_p50"]
        report["seen_prefix_ratio"] = report["seen_prefix_us_p50"] / report["dynamo_us_p50"]
        report["store_ratio"] = report["store_blocks_per_s"] / report["dynamo_store_blocks_per_s"]


def _match_times(index: Index, chains: Sequence[Sequence[int]]) -> list[float]:
    took = []
    for keys in chains:
        began = time.perf_counter()
        index.match(keys)
        took.append(time.perf_counter() - began)
    return took


def scale(report: dict[str, Any]) -> None:
    """The same decision with more replicas, and with longer prompts."""
    prompts = [tokens.tobytes() for tokens in sequences()]
    for replicas in (4, 16, 64, 1000):
        took = times(decide(filled(prompts, replicas)), prompts)
        report[f"decision_{replicas}_replicas_us_p50"] = percentile(took, 0.5)
    for thousands in (1, 8, 32, 128):
        prompts = [tokens.tobytes() for tokens in sequences(40, thousands * 1024 // BLOCK)]
        index, seen = filled(prompts, REPLICAS), KeyChains(1 << 16)
        times(decide_seen(index, seen), prompts)
        for name, work in (("", decide(index)), ("seen_", decide_seen(index, seen))):
            took = [t for _ in range(3) for t in times(work, prompts)]
            report[f"decision_{name}{thousands}k_us_p50"] = percentile(took, 0.5)


def main() -> int:
    if not PEER.exists():
        print("no peer: `make peers` installs it; ratios are left out", file=sys.stderr)
    report: dict[str, Any] = {}
    compare(report, [tokens.tobytes() for tokens in sequences()])
    print("replicas and prompt lengths", flush=True)
    scale(report)
    report["bytes_per_block"] = bytes_per_block()
    print(json.dumps({name: round(figure, 3) for name, figure in report.items()}), flush=True)
    return 0
