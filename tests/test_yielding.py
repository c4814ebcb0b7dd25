"""Requests of priority above 0 make no step longer for others."""

from collections.abc import Iterable

import pytest
from test_scheduler import Bench, prompt

from replicas.radix.scheduler import YIELDS
from replicas.radix.waiting import Policy, Work

POLICIES: tuple[Policy, ...] = ("fcfs", "longest_prefix", "least_uncached", "dfs_weight")


@pytest.mark.parametrize("policy", POLICIES)
def test_who_yields_prefills_little_and_not_beside_others(policy: Policy) -> None:
    bench = Bench(policy=policy, chunk=32)
    late = bench.add(prompt(20, seed=1), max_tokens=1, priority=1)
    bench.step()
    assert [chunk.end - chunk.start for chunk in bench.chunks] == [32 // YIELDS]
    usual = [bench.add(prompt(40, seed=seed), max_tokens=1) for seed in (2, 3)]
    for _ in range(3):  # 80 tokens
        bench.step()
        assert late not in bench.computing()
    assert set(usual) == set(bench.finished)
    bench.drain()
    assert bench.computed(late) == 20
    bench.check_quiet()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_goes_first_is_not_slower_for_being_alone(policy: Policy) -> None:
    bench = Bench(policy=policy, chunk=32)
    for priority in (0, -1):
        bench.add(prompt(32, seed=priority), max_tokens=1, priority=priority)
        bench.step()
        assert [chunk.end - chunk.start for chunk in bench.chunks] == [32]


def test_who_is_overdue_yields_no_more() -> None:
    bench = Bench(policy="least_uncached", chunk=32, starvation_s=3.0)
    late = bench.add(prompt(64, seed=1), max_tokens=1, priority=1)
    steps = 0
    while late not in bench.finished:
        bench.add(prompt(32, seed=10 + steps), max_tokens=1)
        bench.step()
        steps += 1
    assert steps == 3 + 2  # it waits for three, and takes two whole ones
    bench.drain()
    bench.check_quiet()


def test_a_prefill_that_yields_goes_on_when_what_goes_before_it_does_not_fit() -> None:
    bench = Bench(policy="least_uncached", chunk=32, blocks=16)
    late = bench.add(prompt(32, seed=1), max_tokens=1, priority=1)
    bench.step()
    usual = bench.add(prompt(40, seed=2), max_tokens=1)  # 18 blocks for both
    bench.step()
    assert bench.computing() == [late]
    bench.drain()
    assert set(bench.finished) == {late, usual}
    bench.check_quiet()


def test_those_who_yield_share_a_step() -> None:
    bench = Bench(policy="least_uncached", chunk=64)
    short = [bench.add(prompt(4, seed=seed), max_tokens=1, priority=1) for seed in range(4)]
    bench.step()
    assert set(bench.finished) == set(short[:2])  # 8 tokens
    bench.drain()
    bench.check_quiet()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_for_the_prefix_of_one_who_yields(policy: Policy) -> None:
    bench = Bench(policy=policy, chunk=32)
    late = bench.add([*prompt(64, seed=1), 1], max_tokens=1, priority=1)
    bench.step()
    usual = bench.add([*prompt(64, seed=1), 2], max_tokens=1)
    for _ in range(3):
        bench.step()
    assert usual in bench.finished and late not in bench.finished
    bench.drain()
    bench.check_quiet()


def test_beside_a_prefill_who_waits_is_looked_at_only_where_one_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(policy="longest_prefix", chunk=32)
    bench.add(prompt(64, seed=1), max_tokens=1)
    bench.step()
    asked: list[float] = []
    look = bench.scheduler._waiting.next

    def looked(now: float, running: Iterable[Work]) -> Work | None:
        asked.append(now)
        return look(now, running)

    monkeypatch.setattr(bench.scheduler._waiting, "next", looked)
    bench.add(prompt(8, seed=2), max_tokens=1)
    bench.step()
    assert not asked
    first = bench.add(prompt(32, seed=3), max_tokens=1, priority=-1)
    bench.step()
    assert asked and bench.computing() == [first]
    bench.drain()
