"""The router's metrics: what they count, and that they end with what they are about."""

from gated_replica import MODEL
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_fleet import Setup, eventually, prompt, setup

from router.observe.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """One scrape: value by name and label values."""
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metrics_of(fleet: Setup) -> Metrics:
    return Metrics(fleet.fleet, fleet.index, fleet.dispatcher, fleet.recoveries)


async def test_one_gap_lies_between_two_steps() -> None:
    async with setup(replicas=1) as fleet:
        metrics = metrics_of(fleet)
        for steps in (1, 3):
            recording = metrics.started("r", "e", "t", MODEL)
            recording.routed("any", 10, 0, 0)
            for _ in range(steps):
                recording.step(1)
        assert samples(metrics)["hotbranch_inter_token_seconds_count", MODEL] == 0 + 2
        assert samples(metrics)["hotbranch_generated_tokens_total", MODEL, "t"] == 1 + 3


async def test_unknown_is_not_overpredicted() -> None:
    async with setup(replicas=1) as fleet:
        metrics = metrics_of(fleet)
        metrics.count_prompt("t", MODEL, "any", 64, 48, None)
        metrics.count_prompt("t", MODEL, "any", 64, 48, 32)
        counts = metrics.routed["overpredicted_tokens"].labels("t", MODEL, "any")
        assert counts._value.get() == 16


async def test_the_series_of_a_replica_go_when_it_goes() -> None:
    async with setup() as fleet:
        metrics = metrics_of(fleet)
        for replica in fleet.replicas:
            metrics.count_prompt("t", MODEL, replica.address, 64, 48, 32)
        gone, stays = (replica.address for replica in fleet.replicas)
        assert any(gone in key for key in samples(metrics))
        fleet.discovery.set(stays)
        await eventually(lambda: len(fleet.fleet.links) == 1)
        left = samples(metrics)
        assert not [key for key in left if gone in key]
        assert [key for key in left if stays in key]


async def test_two_addresses_under_one_name_are_two_replicas_and_one_series() -> None:
    async with setup() as fleet:
        metrics = metrics_of(fleet)
        for link in fleet.fleet.links:
            assert link.description
            link.description.replica_id = "twin"
        found = samples(metrics)
        assert found["hotbranch_replicas", "ready"] == 2
        assert found["hotbranch_replica_in_flight", "twin"] == 0
        await fleet.generate(prompt(1))
