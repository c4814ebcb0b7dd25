"""How busy a server is, from what it publishes: vLLM's or SGLang's /metrics, or vLLM's /load."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

import orjson
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_RUNNING = {"vllm:num_requests_running", "sglang:num_running_reqs"}
_WAITING = {"vllm:num_requests_waiting", "sglang:num_queue_reqs"}
_USAGE = {"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"}
_TOKENS = {"sglang:max_total_num_tokens"}
_STARTED = "process_start_time_seconds"
# by name: the labels that have the tokens of a block, and the number of blocks
_CACHE = {
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "sglang:cache_config_info": ("page_size", "num_pages"),
}
_WANTED = {name.encode() for name in {*_RUNNING, *_WAITING, *_USAGE, *_TOKENS, *_CACHE, _STARTED}}


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests of all ranks together; `usage` is the share of the KV cache that they hold. Of each
    rank: `block_size` in tokens, `blocks` and `tokens` of the cache; 0 where it does not say, also
    when its process `started`, in seconds since the epoch."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    block_size: int = 0
    blocks: int = 0
    tokens: int = 0
    started: float = 0.0


def from_metrics(text: bytes) -> Figures | None:
    """None where nothing in it is about load. Reads a few lines of the many that there are."""
    values: dict[str, list[float]] = defaultdict(list)
    size = blocks = 0
    for sample in _samples(text):
        if sample.name in _CACHE:
            size, blocks = (_whole(sample.labels.get(label, "")) for label in _CACHE[sample.name])
        elif isfinite(sample.value):
            values[sample.name].append(sample.value)
    started = values.pop(_STARTED, [0.0])
    if not values:
        return None

    def of(names: set[str]) -> list[float]:
        return [value for name in names for value in values.get(name, [])]

    return Figures(
        running=int(sum(of(_RUNNING))),
        waiting=int(sum(of(_WAITING))),
        usage=fmean(of(_USAGE) or [0.0]),
        block_size=size,
        blocks=blocks,
        tokens=int(max(of(_TOKENS), default=0)),
        started=started[0],
    )


def from_load(body: bytes) -> Figures | None:
    """Of vLLM's /load; None for anything else."""
    try:
        load = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    count = load.get("server_load") if isinstance(load, dict) else None
    return Figures(running=max(0, count)) if isinstance(count, int) else None


def _samples(text: bytes) -> Iterator[Sample]:
    """Of the metrics that are wanted; none of what cannot be read."""
    lines = [line for line in text.splitlines() if _name(line) in _WANTED]
    try:
        for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode()):
            yield from family.samples
    except ValueError:
        return


def _name(line: bytes) -> bytes:
    return line.partition(b"{")[0].partition(b" ")[0]


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
