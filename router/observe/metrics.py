"""What the router measures, in Prometheus form.

Label values are bounded: tenants and models come from the settings, endpoints are routes, and the
series of a replica go when it goes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hotbranch import __version__
from hotbranch.states import NAMES
from router.fleet.link import State
from router.fleet.member import Member, Members
from router.index.index import Index
from router.index.view import RECOVERIES
from router.schedule.dispatch import QueueingDispatcher

# Seconds. From a cached prefix on a GPU to a cold long prompt on a CPU.
TTFT_BUCKETS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
)
ITL_BUCKETS = (
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1,
    2.5,
    5,
    10,
)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_ROUTED = ("tenant", "model", "replica")


class Metrics:
    """Implements `router.api.recorder.Recorder`, in a registry of its own."""

    def __init__(
        self,
        fleet: Members[Any],
        index: Index,
        dispatcher: QueueingDispatcher[Any],
        recoveries: Mapping[str, int],
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self._fleet = fleet
        # first, so that the series of a replica that went are gone before they are read
        registry.register(_StateCollector(fleet, index, dispatcher, recoveries, self._forget_gone))
        Info("hotbranch_build", "What runs here.", registry=registry).info({"version": __version__})
        self.answers = Counter(
            "hotbranch_http_responses",
            "HTTP answers.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.requests = Counter(
            "hotbranch_requests",
            "Generation requests by outcome.",
            ["tenant", "model", "status"],
            registry=registry,
        )
        self.ttft = Histogram(
            "hotbranch_time_to_first_token_seconds",
            "Request to first delta.",
            ["tenant", "model"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.gap = Histogram(
            "hotbranch_inter_token_seconds",
            "Gap between the engine steps of one request.",
            ["model"],
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "hotbranch_request_duration_seconds",
            "Request to its end.",
            ["tenant", "model"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.routed = {
            name: Counter(f"hotbranch_{name}", text, _ROUTED, registry=registry)
            for name, text in (
                ("prompts", "Prompts that got a first token."),
                ("prompt_tokens", "Tokens of these prompts."),
                (
                    "predicted_cached_tokens",
                    "Prompt tokens the replica was believed to hold.",
                ),
                ("cached_tokens", "Prompt tokens the replica's cache delivered."),
                (
                    "overpredicted_tokens",
                    "Predicted tokens that the cache did not deliver.",
                ),
            )
        }
        self.unpredicted_requests = Counter(
            "hotbranch_unpredicted_requests",
            "Requests passed on whose prompt is not known to us, by why.",
            ["reason"],
            registry=registry,
        )
        self.generated = Counter(
            "hotbranch_generated_tokens",
            "Tokens generated.",
            ["tenant", "model"],
            registry=registry,
        )
        self._routed_labels: dict[str, set[tuple[str, str]]] = {}  # replica -> (tenant, model)

    def started(self, request_id: str, endpoint: str, tenant: str, model: str) -> "Recording":
        return Recording(self, tenant, model, time.perf_counter())

    def answered(self, endpoint: str, status: int) -> None:
        self.answers.labels(endpoint, str(status)).inc()

    def count_prompt(
        self,
        tenant: str,
        model: str,
        replica: str,
        tokens: int,
        predicted: int,
        cached: int | None,
    ) -> None:
        if replica not in self._routed_labels:
            self._forget_gone()
        self._routed_labels.setdefault(replica, set()).add((tenant, model))
        counts = {
            "prompts": 1,
            "prompt_tokens": tokens,
            "predicted_cached_tokens": predicted,
            "cached_tokens": cached or 0,
            "overpredicted_tokens": 0 if cached is None else max(0, predicted - cached),
        }
        for name, count in counts.items():
            self.routed[name].labels(tenant, model, replica).inc(count)

    def unpredicted(self, reason: str) -> None:
        self.unpredicted_requests.labels(reason).inc()

    def count_settled(
        self, tenant: str, model: str, replica: str, predicted: int, cached: int | None
    ) -> None:
        """What an answer that was passed on said of a prompt that was counted."""
        if cached is not None and (tenant, model) in self._routed_labels.get(replica, ()):
            self.routed["cached_tokens"].labels(tenant, model, replica).inc(cached)
            over = max(0, predicted - cached)
            self.routed["overpredicted_tokens"].labels(tenant, model, replica).inc(over)

    def _forget_gone(self) -> None:
        here = {link.replica_id for link in self._fleet.links}
        for replica in self._routed_labels.keys() - here:
            for tenant, model in self._routed_labels.pop(replica):
                for counter in self.routed.values():
                    counter.remove(tenant, model, replica)


@dataclass(slots=True)
class Recording:
    """One generation request; implements `router.api.recorder.Recording`."""

    metrics: Metrics
    tenant: str
    model: str
    began: float
    last: float = 0.0
    steps: int = 0

    def routed(
        self,
        replica_id: str,
        prompt_tokens: int,
        predicted_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        self.metrics.count_prompt(
            self.tenant,
            self.model,
            replica_id,
            prompt_tokens,
            predicted_tokens,
            cached_tokens,
        )
        if not self.last:
            self.last = time.perf_counter()
            self.metrics.ttft.labels(self.tenant, self.model).observe(self.last - self.began)

    def step(self, tokens: int) -> None:
        now = time.perf_counter()
        if self.steps:
            self.metrics.gap.labels(self.model).observe(now - self.last)
        self.steps += 1
        self.last = now
        self.metrics.generated.labels(self.tenant, self.model).inc(tokens)

    def settled(
        self,
        replica_id: str,
        predicted_tokens: int,
        cached_tokens: int | None,
        generated: int,
    ) -> None:
        self.metrics.count_settled(
            self.tenant, self.model, replica_id, predicted_tokens, cached_tokens
        )
        self.metrics.generated.labels(self.tenant, self.model).inc(generated)

    def finished(self, status: int) -> None:
        self.metrics.requests.labels(self.tenant, self.model, str(status)).inc()
        elapsed = time.perf_counter() - self.began
        self.metrics.duration.labels(self.tenant, self.model).observe(elapsed)


class _StateCollector(Collector):
    """Reads fleet, index and dispatcher at each scrape."""

    def __init__(
        self,
        fleet: Members[Any],
        index: Index,
        dispatcher: QueueingDispatcher[Any],
        recoveries: Mapping[str, int],
        before: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._dispatcher = dispatcher
        self._recoveries = recoveries
        self._before = before

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._before()
        yield from self._router()
        yield from self._replicas()

    def _router(self) -> Iterator[Metric]:
        index, dispatcher = self._index, self._dispatcher
        yield _gauge("index_blocks", "Distinct blocks that replicas reported.", index.blocks)
        yield _gauge("index_predicted_blocks", "Predicted blocks.", index.predicted_blocks)
        yield _gauge("open_routes", "Prompts sent and not finished.", dispatcher.open_routes)
        yield _gauge("waiting_prompts", "Prompts that wait for their turn.", dispatcher.waiting)
        yield CounterMetricFamily(
            "hotbranch_stolen_prompts",
            "Waiting prompts that an idle replica took over from another.",
            dispatcher.stolen,
        )
        yield CounterMetricFamily(
            "hotbranch_retries",
            "Prompts placed again before a first token.",
            dispatcher.retries,
        )
        yield CounterMetricFamily(
            "hotbranch_hashed_blocks",
            "Prompt blocks whose keys were not remembered.",
            dispatcher.chains.hashed,
        )
        yield CounterMetricFamily(
            "hotbranch_index_forgotten_blocks",
            "Reported blocks dropped to stay below index_blocks.",
            index.forgotten,
        )
        recoveries = CounterMetricFamily(
            "hotbranch_index_recoveries",
            "Breaks in what replicas report, by kind.",
            labels=["kind"],
        )
        for kind in RECOVERIES:
            recoveries.add_metric([kind], self._recoveries.get(kind, 0))
        yield recoveries
        placements = CounterMetricFamily(
            "hotbranch_placements", "Placements by what decided.", labels=["reason"]
        )
        for reason, count in dispatcher.placements.items():
            placements.add_metric([reason], count)
        yield placements

    def _replicas(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "hotbranch_replicas", "Replicas by state of their link.", labels=["state"]
        )
        for state in State:
            states.add_metric([state], sum(link.state is state for link in self._fleet.links))
        yield states
        # two addresses under one name would break the whole scrape
        links = list({link.replica_id: link for link in self._fleet.links}.values())
        reported = GaugeMetricFamily(
            "hotbranch_replica_reported_state",
            "1 for the state that a replica reports of its engine.",
            labels=["replica", "state"],
        )
        for link in links:
            for name in NAMES.values():
                reported.add_metric([link.replica_id, name], link.reported_state == name)
        yield reported
        families = {
            name: GaugeMetricFamily(f"hotbranch_replica_{name}", text, labels=["replica"])
            for name, text in _REPLICA_GAUGES.items()
        }
        for link in links:
            for name, value in _replica_figures(link, self._index).items():
                families[name].add_metric([link.replica_id], value)
        yield from families.values()


_REPLICA_GAUGES = {
    "in_flight": "Choices that this router has open there.",
    "load_outstanding_tokens": "Estimated uncached prompt tokens still to prefill.",
    "load_running": "Requests running, as last reported.",
    "load_waiting": "Requests in the engine's queue, as last reported.",
    "kv_used_blocks": "Blocks held by running requests, as last reported.",
    "kv_cached_blocks": "Blocks in the replica's tree, as last reported.",
    "kv_total_blocks": "Blocks of the replica's pool.",
    "index_blocks_held": "Blocks the index holds for the replica, on its GPU.",
    "report_age_seconds": "Since the last message of the replica's cache stream.",
}


def _replica_figures(link: Member, index: Index) -> dict[str, float]:
    figures: dict[str, float] = {
        "in_flight": link.in_flight,
        "load_outstanding_tokens": link.outstanding.tokens,
        "index_blocks_held": sum(index.held_count(holder) for holder in link.holders),
    }
    if link.watcher.heard_at:
        figures["report_age_seconds"] = time.monotonic() - link.watcher.heard_at
    if link.load:
        figures |= {
            "load_running": link.load.running,
            "load_waiting": link.load.waiting,
            "kv_used_blocks": link.load.used_blocks,
            "kv_cached_blocks": link.load.cached_blocks,
            "kv_total_blocks": link.load.total_blocks,
        }
    return figures


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hotbranch_{name}", text, value)
