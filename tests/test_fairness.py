"""A tenant that asks for ten times what others do, and the figures that judge it."""

import pytest

from bench.fleet.fairness import (
    DOCUMENTS,
    HEAVY,
    JAIN,
    Crowd,
    Fairness,
    backlog,
    fairness,
    max_min,
    missed,
    play,
    shares,
)
from bench.fleet.report import jain
from bench.fleet.simulation import Served
from router.schedule.shares import Shares


def served(tenant: str, at: float, first: float, last: float, tokens: int) -> Served:
    return Served(at, tenant, tokens, 10, first=first, last=last, end=last, generated=10)


def test_light_tenants_notice_a_heavy_one_much_less_than_without_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd(DOCUMENTS, rate=1.3, seconds=30.0, replicas=2)
    found = fairness(crowd)
    assert found.jain >= JAIN
    with monkeypatch.context() as changed:
        changed.setattr(Shares, "over", lambda shares, tenant: False)
        assert found.light_p99 < fairness(crowd).light_p99 / 2
    monkeypatch.setattr(Shares, "floods", lambda shares, tenant: False)  # replicas know nothing
    assert found.light_p99 < fairness(crowd).light_p99 * 0.75


def test_of_tenants_that_all_ask_for_more_each_gets_what_its_weight_says() -> None:
    weights = {"light1": 2.0, HEAVY: 4.0}
    crowd = Crowd(DOCUMENTS, 8.0, light=2, heavier=1.0, seconds=50.0, replicas=1, weights=weights)
    they = play(crowd, True)
    assert jain(list(shares(they, weights, 5.0, 50.0).values())) >= JAIN
    assert jain(list(shares(they, {}, 5.0, 50.0).values())) < JAIN  # so that weights matter


def test_max_min_gives_what_is_asked_for_or_the_same_to_all() -> None:
    assert max_min({"a": 10, "b": 50, "c": 90}, {}, 90) == {"a": 10, "b": 40, "c": 40}
    assert max_min({"a": 90, "b": 90}, {"b": 2.0}, 90) == {"a": 30, "b": 60}
    assert max_min({"a": 1, "b": 2}, {}, 90) == {"a": 1, "b": 2}


def test_service_is_the_prompt_as_it_begins_and_twice_the_reply_as_it_comes() -> None:
    they = [
        served(HEAVY, 0.0, 2.0, 4.0, 100),
        served("light", 1.0, 2.5, 2.5, 40),  # all within: 60 of 60
        served("light", 9.0, 9.5, 9.6, 500),  # not asked for yet
    ]
    # of heavy's 120 the prompt and half of the reply: 110
    assert shares(they, {}, 1.0, 3.0) == {HEAVY: 1.0, "light": 1.0}
    assert shares(they, {}, 2.5, 3.0)[HEAVY] == pytest.approx(5 / 15)  # 15 were left of it


def test_the_heavy_tenant_is_backlogged_while_something_of_it_always_waits() -> None:
    spans = ((0.0, 1.0), (2.0, 4.0), (3.0, 8.0), (9.0, 9.5))
    they = [served(HEAVY, at, first, first, 1) for at, first in spans]
    assert backlog(they, 100.0) == (2.0, 8.0)
    assert backlog(they, 7.0) == (2.0, 7.0)


def test_what_misses_an_aim_is_named() -> None:
    assert list(missed({"x": Fairness(1.5, 2.0, 0.3, 0.2, 0.95)})) == []
    assert len(list(missed({"x": Fairness(1.6, 2.0, 0.3, 0.2, 0.94)}))) == 2
