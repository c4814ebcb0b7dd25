"""What a replica measures, in Prometheus form. No label takes a value from a request."""

from collections.abc import Callable, Iterator
from functools import partial
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hotbranch import __version__
from hotbranch.states import NAMES
from hotbranch.v1.replica_pb2 import Description
from replicas.engine import Finish, Load

PREFIX = "hotbranch_replica"

# Seconds. A cached prefix on a GPU answers in milliseconds, a cold long prompt on a CPU in minutes.
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
# Seconds. A decode step takes 5 to 50 ms; a step mixed with prefill chunks, or one on a CPU, more.
ITL_BUCKETS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)

_GAUGES = (
    ("running_requests", "running", "Requests in the running batch."),
    ("waiting_requests", "waiting", "Requests waiting in the engine."),
    ("outstanding_tokens", "outstanding_tokens", "Uncached prompt tokens still to prefill."),
    ("used_blocks", "used_blocks", "KV blocks held by running requests."),
    ("cached_blocks", "cached_blocks", "KV blocks in the radix tree."),
    ("total_blocks", "total_blocks", "KV blocks of the pool."),
    ("batch_context_tokens", "batch_context_tokens", "Context of the running requests, summed."),
    ("step_seconds", "step_s", "One decode step, moving average."),
    ("prefill_token_seconds", "prefill_s_per_token", "Prefill of one token, moving average."),
)


def _is_in(description: Description, state: int) -> bool:
    return description.state == state


class _LoadCollector(Collector):
    """Reads the load once per scrape, so that all its figures are of the same step."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def describe(self) -> list[Metric]:
        """Empty: registering must not need an engine that already has a load."""
        return []

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, attribute, text in _GAUGES:
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, getattr(load, attribute))
        yield CounterMetricFamily(
            f"{PREFIX}_evicted_blocks", "KV blocks evicted since start.", load.evicted_blocks
        )


class Metrics:
    """The metrics of one replica, in a registry of their own. Until `attach` it has no load."""

    def __init__(self, description: Description) -> None:
        self.registry = registry = CollectorRegistry()
        state = Gauge(f"{PREFIX}_state", "1 for the state it is in.", ["state"], registry=registry)
        for number, name in NAMES.items():
            state.labels(name).set_function(partial(_is_in, description, number))
        self._build = Info(f"{PREFIX}_build", "What runs here.", registry=registry)
        self._tell_build(description)

        self._requests = Counter(
            f"{PREFIX}_requests", "Finished requests.", ["reason"], registry=registry
        )
        for finish in Finish:
            self._requests.labels(finish.name.lower())
        self._rejections = Counter(
            f"{PREFIX}_rejections", "Submissions refused.", ["reason"], registry=registry
        )
        self.ttft = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "Submission to first delta.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.gap = Histogram(
            f"{PREFIX}_inter_token_seconds",
            "Gap between two deltas of one request.",
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens", "Prompt tokens of started requests.", registry=registry
        )
        self.cached_tokens = Counter(
            f"{PREFIX}_cached_tokens", "Prompt tokens found in the cache.", registry=registry
        )
        self.generated_tokens = Counter(
            f"{PREFIX}_generated_tokens", "Tokens generated.", registry=registry
        )
        self.streams = Gauge(f"{PREFIX}_open_streams", "Serve streams.", registry=registry)
        self.watchers = Gauge(f"{PREFIX}_watchers", "WatchCache streams.", registry=registry)
        self.sequence = Gauge(
            f"{PREFIX}_cache_sequence", "Cache deltas in this epoch.", registry=registry
        )
        self._epoch = Info(f"{PREFIX}_cache_epoch", "The epoch of the cache.", registry=registry)

    def attach(self, description: Description, load: Callable[[], Load]) -> None:
        """The engine is there."""
        self._tell_build(description)
        self.registry.register(_LoadCollector(load))
        if description.engine == "vllm":
            self.registry.register(REGISTRY)  # vLLM's own metrics, in the process's registry

    def finished(self, finish: Finish) -> None:
        self._requests.labels(finish.name.lower()).inc()

    def rejected(self, reason: str) -> None:
        """`reason` is a name of the contract's Rejection.Reason."""
        self._rejections.labels(reason.removeprefix("REASON_").lower()).inc()

    def new_epoch(self, epoch: int) -> None:
        """The epoch is a label value because a sample, a float64, would round it."""
        self._epoch.info({"epoch": str(epoch)})
        self.sequence.set(0)

    def _tell_build(self, here: Description) -> None:
        self._build.info({"version": __version__, "engine": here.engine, "model": here.model})

    def serve(self, host: str, port: int) -> WSGIServer:
        """Answer scrapes on a thread; raises OSError when the port is taken."""
        return start_http_server(port, addr=host, registry=self.registry)[0]
