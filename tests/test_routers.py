"""Many routers before the same replicas, under virtual time."""

import pytest

from bench.fleet.load import Load, load, no_renderer
from bench.fleet.routers import HIT, Routers, missed, routers
from hotbranch.settings import SimulateSettings
from replicas.simulated.profile import DEFAULT, Profile

H100 = Profile.load(DEFAULT)


def shape(name: str, requests: int) -> Load:
    settings = SimulateSettings(trace=f"shape:{name}", requests=requests)
    return load(settings, no_renderer, H100.kv_tokens)


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_field_report_16_the_hit_rate_is_flat_with_the_number_of_routers(name: str) -> None:
    found = routers(shape(name, 1500), H100, 8)
    assert found.hit_ratio >= HIT
    assert found.ttft_ratio < 1.5


def test_field_report_5_what_many_routers_pile_up_before_a_replica_is_bounded() -> None:
    """A load without reuse, so that each of them wants the replica that was idle."""
    found = routers(shape("unique", 1000), H100, 8)
    assert found.most_ahead < 6 * found.most_ahead_of_one < found.bound
    assert found.ttft_ratio < 4


def test_what_misses_an_aim_is_named() -> None:
    assert list(missed({"x": Routers(0.95, 1.0, 9, 9, 9)})) == []
    assert len(list(missed({"x": Routers(0.94, 1.0, 10, 9, 9)}))) == 2
