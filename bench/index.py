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
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from bench.index_workload import BLOCK, BLOCKS, REPLICAS, percentile, sequences
from hotbranch.keys import block_keys, root
from router.fleet.holder import Holder
from router.index.chains import KeyChains
from router.index.index import Index

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-dynamo/bin/python"
ROUNDS = 5
SEED = root("bench")
MILLION = 1_000_000
T = TypeVar("T")


def filled(prompts: Sequence[bytes], replicas: int) -> Index:
    """An index in which prompt i is held by replica i modulo `replicas`."""
    index = Index()
    for replica in range(replicas):
        index.add(holder(replica, replicas), BLOCK)
    for i, prompt in enumerate(prompts):
        index.store(holder(i, replicas), None, block_keys(prompt, BLOCK, SEED), now=0.0)
    return index


def holder(i: int, replicas: int = REPLICAS) -> Holder:
    """Who has prompt i."""
    return Holder(str(i % replicas))


def times(work: Callable[[T], object], items: Sequence[T]) -> list[float]:
    """Seconds of each call."""
    took = []
    for item in items:
        began = time.perf_counter()
        work(item)
        took.append(time.perf_counter() - began)
    return took


def decide(index: Index) -> Callable[[bytes], object]:
    return lambda prompt: index.match(block_keys(prompt, BLOCK, SEED)).depths()


def decide_seen(index: Index, chains: KeyChains) -> Callable[[bytes], object]:
    return lambda prompt: index.match(chains.keys(prompt, BLOCK, SEED)).depths()


def dispatch(index: Index) -> Callable[[tuple[int, Sequence[int]]], object]:
    """What the index is told of a prompt that goes where it was before."""
    return lambda sent: index.predict(holder(sent[0]), sent[1], now=0.0)


def store_rate(chains: Sequence[Sequence[int]]) -> float:
    index = filled([], REPLICAS)
    began = time.perf_counter()
    for i, keys in enumerate(chains):
        index.store(holder(i), None, keys, now=0.0)
    return sum(map(len, chains)) / (time.perf_counter() - began)


def evict_rate(prompts: Sequence[bytes], chains: Sequence[Sequence[int]]) -> float:
    index = filled(prompts, REPLICAS)
    began = time.perf_counter()
    for i, keys in enumerate(chains):
        index.evict(holder(i), keys[::-1])
    return sum(map(len, chains)) / (time.perf_counter() - began)


def bytes_per_block() -> float:
    """Of a million blocks as they come from reports: every key an integer of its own."""
    chain = array("Q", range(1 << 60, (1 << 60) + MILLION * 7, 7))
    index = filled([], REPLICAS)
    tracemalloc.start()
    for i in range(0, MILLION, BLOCKS):
        index.store(holder(i // BLOCKS), None, chain[i : i + BLOCKS].tolist(), now=0.0)
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
    index, seen = filled(prompts, REPLICAS), KeyChains(1 << 23)
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
        note(match_us_p50=percentile(times(index.match, chains), 0.5))
        note(dispatch_us_p50=percentile(times(dispatch(index), list(enumerate(chains))), 0.5))
        index.expire(inf)
    report |= {name: sorted(figures)[ROUNDS // 2] for name, figures in rounds.items()}
    if peer:
        peer.close()
        report["decision_ratio"] = report["decision_us_p50"] / report["dynamo_us_p50"]
        report["seen_prefix_ratio"] = report["seen_prefix_us_p50"] / report["dynamo_us_p50"]
        report["store_ratio"] = report["store_blocks_per_s"] / report["dynamo_store_blocks_per_s"]


def scale(report: dict[str, Any]) -> None:
    """The same decision with more replicas, and with longer prompts."""
    prompts = [tokens.tobytes() for tokens in sequences()]
    decisions = {replicas: decide(filled(prompts, replicas)) for replicas in (4, 16, 64, 1000)}
    taken: dict[int, list[float]] = {replicas: [] for replicas in decisions}
    for _ in range(ROUNDS):  # in turn: the CPU does not keep one speed
        for replicas, decision in decisions.items():
            taken[replicas] += times(decision, prompts)
    for replicas, times_taken in taken.items():
        report[f"decision_{replicas}_replicas_us_p50"] = percentile(times_taken, 0.5)
    for thousands in (1, 8, 32, 128):
        prompts = [tokens.tobytes() for tokens in sequences(40, thousands * 1024 // BLOCK)]
        index, seen = filled(prompts, REPLICAS), KeyChains(1 << 23)
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
