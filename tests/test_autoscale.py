"""How many replicas the outstanding work asks for. On a real Ray it is in `test_ray`."""

import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deploy.app import build
from deploy.autoscale import BUSY, Demand, Meter, OutstandingWork, demand, wanted
from deploy.registry import EXPIRY_S, Directory
from hotbranch.load_settings import SettingsError, load_settings
from hotbranch.settings import UpSettings
from replicas.engine import Load

QUEUE_S = 2.0
OWN_MODULES_ARE_MISSING = """
import pickle, sys
policy = pickle.loads(sys.stdin.buffer.read())
assert not [name for name in sys.modules if name.split(".")[0] in ("deploy", "hotbranch")]
class Context:
    running_replicas, target_num_replicas = [1], 1
    aggregated_metrics = {"held": {1: 1.0}, "queued_s": {1: 0.9}}
    capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 1, 8
print(policy(0.5)(Context)[0])
"""
loads = st.builds(Demand, st.floats(0, 500), st.floats(0, 64))
numbers = st.integers(1, 64)


def load(outstanding_tokens: int = 0, used_blocks: int = 0, prefill_s: float = 1e-3) -> Load:
    return Load(
        running=0,
        waiting=0,
        outstanding_tokens=outstanding_tokens,
        used_blocks=used_blocks,
        cached_blocks=0,
        total_blocks=100,
        step_s=0.01,
        prefill_s_per_token=prefill_s,
        evicted_blocks=0,
        batch_context_tokens=0,
    )


def context(
    reports: Mapping[str, Mapping[str, float]],
    replicas: str = "a",
    target: int = 1,
    bounds: tuple[int, int] = (1, 8),
) -> AutoscalingContext:
    """What Serve hands to a policy, with replicas that are called by one letter each."""
    id = DeploymentID("Replica", "app")
    names = {letter: ReplicaID(letter, id) for letter in replicas}
    return AutoscalingContext(
        deployment_id=id,
        deployment_name=id.name,
        app_name=id.app_name,
        current_num_replicas=len(replicas),
        target_num_replicas=target,
        running_replicas=list(names.values()),
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={
            metric: {names[letter]: value for letter, value in values.items()}
            for metric, values in reports.items()
        },
        raw_metrics=None,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(),
    )


def decision(**what: object) -> int:
    return OutstandingWork(QUEUE_S)(context(**what))[0]  # type: ignore[arg-type]


def full(letters: str, **means: float) -> dict[str, dict[str, float]]:
    """The same report of each replica."""
    idle = {"ahead_s": 0.0, "prefills": 0.0, "held": 0.0, "queued_s": 0.0}
    return {name: dict.fromkeys(letters, value) for name, value in (idle | means).items()}


def test_a_meter_averages_what_happened_since_it_was_last_read() -> None:
    meter = Meter()
    for sample in (load(3000, 10), load(), load(1000, 50), load()):
        meter.sample(sample)
    assert meter.read() == pytest.approx({"ahead_s": 1.0, "prefills": 0.5, "held": 0.15})
    assert meter.read() == {}
    meter.sample(load(used_blocks=100))
    assert meter.read() == pytest.approx({"ahead_s": 0.0, "prefills": 0.0, "held": 1.0})


def test_what_waits_at_routers_counts_once_and_a_replica_by_what_is_fullest() -> None:
    reports = full("abc", queued_s=3.0)
    reports["queued_s"]["c"] = 0.0  # it has not heard yet
    reports["ahead_s"] = {"a": 1.0, "b": 0.5}
    reports["prefills"] = {"a": 0.9, "b": 0.2, "c": 0.0}
    reports["held"] = {"a": 0.1, "b": 0.7, "c": 0.0}
    assert demand(reports) == Demand(pytest.approx(4.5), pytest.approx(1.6))
    assert demand({}) == Demand(0.0, 0.0)


def test_the_builder_hands_the_policy_over_by_value() -> None:
    """Serve's controller may lie where our modules are not."""
    args = {"replicas": "2", "max_replicas": "5", "target_queue_s": "0.5", "scale_down_s": "60"}
    router = build(args)._bound_deployment
    replica = router.init_args[1]._bound_deployment
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (10.0, 60.0)
    assert router._deployment_config.autoscaling_config is None
    without = [sys.executable, "-I", "-c", OWN_MODULES_ARE_MISSING]
    given = scaling.policy.get_serialized_policy_def()
    said = subprocess.run(without, input=given, stdout=subprocess.PIPE, check=True).stdout
    assert float(said) == 2.0


def test_a_number_that_may_change_has_a_sensible_bound() -> None:
    def settings(**flags: object) -> UpSettings:
        return load_settings(UpSettings, flags, {})

    assert settings(replicas=4).most_replicas == 4
    assert settings(replicas=2, max_replicas=8).most_replicas == 8
    with pytest.raises(SettingsError, match=r"^--max-replicas 2: .*no less than replicas$"):
        settings(replicas=3, max_replicas=2)


def test_routers_that_say_nothing_have_nothing_that_waits() -> None:
    directory = Directory(born=0.0)
    directory.hear_queue("one", 2.0, 1.0)
    directory.hear_queue("other", 5.0, 1.0)
    directory.hear_queue("one", 3.0, 5.0)
    assert directory.queued_s(5.0) == 8.0
    assert directory.queued_s(1.0 + EXPIRY_S) == 3.0
    assert directory.queued_s(5.0 + EXPIRY_S) == 0.0


@pytest.mark.parametrize(
    ("means", "number"),
    [
        ({}, 1),
        ({"queued_s": 2.0}, 2),  # it is shared by so many that each has half of the target
        ({"queued_s": 7.9}, 4),
        ({"ahead_s": 3.0, "queued_s": 3.0}, 5),  # of two replicas, and once
        ({"prefills": 1.0}, 3),
        ({"held": 0.75}, 2),
        ({"held": 1.0, "queued_s": 100.0}, 8),
    ],
)
def test_two_replicas_become(means: dict[str, float], number: int) -> None:
    assert decision(reports=full("ab", **means), replicas="ab", target=2) == number


def test_nobody_goes_before_all_have_reported() -> None:
    assert decision(reports=full("ab"), replicas="abc", target=3) == 3
    assert decision(reports={}, replicas="abc", target=3) == 3
    assert decision(reports=full("abc"), replicas="abc", target=3) == 1
    assert decision(reports=full("ab", queued_s=10.0), replicas="abc", target=3) == 5


@given(loads, numbers, st.integers(1, 8), st.integers(0, 56))
def test_it_stays_between_the_bounds(given: Demand, now: int, low: int, more: int) -> None:
    reports = full("a", queued_s=given.waits_s, held=given.busy)
    assert low <= decision(reports=reports, target=now, bounds=(low, low + more)) <= low + more


@given(loads, st.floats(0, 500), st.floats(0, 64), numbers, st.integers(0, 9))
def test_more_load_never_means_fewer(
    less: Demand, waits_s: float, busy: float, now: int, more: int
) -> None:
    greater = Demand(less.waits_s + waits_s, less.busy + busy)
    assert wanted(greater, now, QUEUE_S) >= wanted(less, now, QUEUE_S)
    assert wanted(less, now + more, QUEUE_S) >= wanted(less, now, QUEUE_S)


@given(loads, numbers)
def test_what_it_asks_for_is_enough_and_then_it_asks_for_nothing_else(
    given: Demand, now: int
) -> None:
    number = wanted(given, now, QUEUE_S)
    assert given.waits_s <= number * QUEUE_S * (1 + 1e-9)
    assert given.busy <= number * BUSY * (1 + 1e-9)
    assert wanted(given, number, QUEUE_S) == number


@given(numbers)
def test_an_idle_fleet_needs_nobody(now: int) -> None:
    assert wanted(Demand(0.0, 0.0), now, QUEUE_S) == 0


errors = st.floats(0.95, 1.05)


@given(st.floats(0.05, 30), st.floats(0.01, 8), numbers, st.floats(0, 300), errors, errors)
def test_a_constant_load_comes_to_rest(
    work: float, request_s: float, start: int, waits_s: float, error: float, other: float
) -> None:
    """A fleet that has to compute `work` seconds a second, and what waits at first.

    Where it keeps up, requests wait as in an M/D/1 queue. What is measured is off, to and fro.
    """
    number, numbers = start, []
    for _ in range(100):
        waits_s = max(0.0, waits_s + 30.0 * (work - number))
        used = 1.0 if waits_s else work / number
        ahead_s = number * used * request_s
        if used < 1.0:
            ahead_s *= 1 + used / (2 * (1 - used))
        load = Demand((waits_s + ahead_s) * error, min(1.0, used * error) * number)
        number = max(1, wanted(load, number, QUEUE_S))
        numbers.append(number)
        error, other = other, error
    assert len(set(numbers[50:])) == 1, numbers
    assert work / number <= BUSY / 0.95
