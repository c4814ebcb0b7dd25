"""Two vLLM servers behind our router, round robin and other gateways: `python -m bench vllm`.

Everybody asks the same questions about the same documents, of which both together hold some four
fifths: placed well, a document is seldom computed twice; placed badly, again and again. A fixed
number of requests is always open. Policies play in turn, forth and back, on caches that are emptied
in between. What is cached is vLLM's own count. The last line is JSON: policy, metric; exit 1 where
ours is not the best.

Needs `make peers` and two cores: each server has one.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster import free_port
from bench.peers.gateways import COMMANDS, ROOT, Upstream, gateway, process
from hotbranch.embedded import resolve_model
from hotbranch.settings import Common

PYTHON = ROOT / ".venv-vllm/bin/python"
START_S = 240.0
BLOCK = 32  # tokens; the least that vLLM has on a CPU
BLOCKS = 200  # of each server: 6,400 tokens
DOCUMENTS = 24  # of about 640 tokens: together they take 480 blocks
OUTPUT = 8  # tokens
OPEN = 24  # requests at any time
OURS, METRICS = "hotbranch", ("hit_rate", "ttft_mean", "ttft_p99", "throughput")

WORDS = (
    "harbour pilot orchard keeper night train conductor desk station note rule hour edition "
    "number river bridge market window letter copper garden winter lantern answer"
)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw. Seconds, tokens."""

    ttft_s: float
    prompt: int
    cached: int


@contextmanager
def server(model: Path, place: Path, core: int) -> Iterator[Upstream]:
    """One vLLM server on one core, not yet ready."""
    port = free_port()
    upstream = Upstream(
        f"http://127.0.0.1:{port}", f"ipc://{place}/e{core}", f"ipc://{place}/r{core}"
    )
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": upstream.events,
        "replay_endpoint": upstream.replay,
    }
    command = [
        *("taskset", "--cpu-list", str(core)),
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS + 1)),
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
    ]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    with process(command, environ):
        yield upstream


def ready(upstream: Upstream) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{upstream.url}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"a server was not ready within {START_S:.0f} s")


def text(rng: random.Random, words: int) -> str:
    vocabulary = WORDS.split()
    return " ".join(rng.choice(vocabulary) for _ in range(words))


def questions(count: int, seed: int) -> list[bytes]:
    """Bodies: a document, which of them by Zipf's law, and a question of its own."""
    rng = random.Random(seed)
    documents = [f"Document {n}. {text(random.Random(n), 480)}" for n in range(DOCUMENTS)]
    popular = [1 / (rank + 1) ** 0.6 for rank in range(DOCUMENTS)]
    return [
        _body(f"{rng.choices(documents, popular)[0]}\nQuestion: {text(rng, 24)}?\nAnswer:")
        for _ in range(count)
    ]


def _body(prompt: str, output: int = OUTPUT) -> bytes:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def ask(client: httpx.AsyncClient, body: bytes) -> Answer:
    """One streamed completion, to its end."""
    began = time.perf_counter()
    first, usage = 0.0, None
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and not first:
                first = time.perf_counter() - began
            usage = chunk.get("usage") or usage
    if usage is None:
        raise RuntimeError("an answer had no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(first, usage["prompt_tokens"], details.get("cached_tokens") or 0)


async def play(url: str, bodies: Sequence[bytes]) -> Metrics:
    """The same load for everybody: OPEN requests at any time."""
    waiting = iter(bodies)
    answers: list[Answer] = []

    async def customer(client: httpx.AsyncClient) -> None:
        answers.extend([await ask(client, body) for body in waiting])

    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(customer(client) for _ in range(OPEN)))
    seconds = time.perf_counter() - began
    ttfts = sorted(answer.ttft_s for answer in answers)
    return {
        "hit_rate": sum(a.cached for a in answers) / sum(a.prompt for a in answers),
        "ttft_mean": statistics.fmean(ttfts),
        "ttft_p99": ttfts[int(0.99 * (len(ttfts) - 1))],
        "throughput": len(answers) * OUTPUT / seconds,
    }


def measure(upstreams: Sequence[Upstream], bodies: Sequence[bytes], policy: str) -> Metrics:
    for upstream in upstreams:
        httpx.post(f"{upstream.url}/reset_prefix_cache").raise_for_status()
    with gateway(policy, upstreams, _body("Hello", 1)) as url:
        found = asyncio.run(play(url, bodies))
    figures = "  ".join(f"{name} {found[name]:.3f}" for name in METRICS)
    print(f"{policy:20} {figures}", file=sys.stderr, flush=True)
    return found


def missed(found: dict[str, Metrics]) -> Iterator[str]:
    """Where ours is not the best, in words."""
    ours = found[OURS]
    others = [metrics for policy, metrics in found.items() if policy != OURS]
    if ours["hit_rate"] < max(other["hit_rate"] for other in others):
        yield "another has the best hit rate"
    if ours["ttft_mean"] > min(other["ttft_mean"] for other in others):
        yield "another has the best mean time to first token"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=2, help="times each policy plays (2)")
    parser.add_argument("--requests", type=int, default=200, help="in one play (200)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write there too")
    arguments = parser.parse_args()
    for needed in (PYTHON, ROOT / ".venv-gateways/bin/smg"):
        if not needed.exists():
            parser.error(f"{needed} is not there: make peers")
    _, model = resolve_model("smollm2", Common().cache_dir)
    cores = sorted(os.sched_getaffinity(0))[:2]
    runs: dict[str, list[Metrics]] = {policy: [] for policy in COMMANDS}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hb")))
        upstreams = [stack.enter_context(server(model, place, core)) for core in cores]
        for upstream in upstreams:
            ready(upstream)
        for number in range(arguments.rounds):
            bodies = questions(arguments.requests, seed=number)
            order = list(COMMANDS) if number % 2 == 0 else list(COMMANDS)[::-1]
            for policy in order:
                runs[policy].append(measure(upstreams, bodies, policy))
    found = {
        policy: {name: statistics.fmean(run[name] for run in played) for name in METRICS}
        for policy, played in runs.items()
    }
    broken = list(missed(found))
    for sentence in broken:
        print(f"missed: {sentence}", file=sys.stderr)
    line = json.dumps(found)
    if arguments.out:
        arguments.out.write_text(line + "\n")
    print(line)
    return 1 if broken else 0
