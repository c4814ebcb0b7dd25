"""What each admission policy does, and what eviction keeps, under a clock of its own."""

from array import array
from typing import get_args

import pytest
from test_scheduler import SIZE, SPACE, Bench, prompt

from replicas.radix.waiting import WINDOW, Policy

POLICIES = get_args(Policy)


def test_least_uncached_takes_the_shortest_rest_first() -> None:
    bench = Bench(running=1, policy="least_uncached")
    bench.add(prompt(40), max_tokens=1)
    bench.drain()
    ids = [
        bench.add(prompt(24, seed=1), max_tokens=1),  # 24 to compute
        bench.add([*prompt(40), *prompt(29, seed=2)], max_tokens=1),  # the longest match, 29
        bench.add(prompt(9, seed=3), max_tokens=1),  # no match, 9
    ]
    bench.drain()
    assert list(bench.finished)[1:] == [ids[2], ids[0], ids[1]]


def test_dfs_weight_finishes_the_heavier_subtree_before_the_next() -> None:
    """Three below one document, two below another whose match is longer."""
    bench = Bench(running=1, policy="dfs_weight", blocks=128)
    system, light, heavy = prompt(8), prompt(24, seed=1), prompt(12, seed=2)
    for document in (light, heavy):
        bench.add([*system, *document], max_tokens=1)
    bench.drain()
    asked: dict[str, list[int]] = {"light": [], "heavy": [], "system": []}
    last = bench.press()
    for turn in range(3):
        if turn < 2:
            asked["light"].append(bench.add([*system, *light, turn, 1, 2, 3, 4], max_tokens=1))
        asked["heavy"].append(bench.add([*system, *heavy, turn, 1, 2, 3, 4], max_tokens=1))
        asked["system"].append(bench.add([*system, turn, turn], max_tokens=1))
    bench.drain()
    order = list(bench.finished)[2:]
    assert order == [*asked["heavy"], *asked["light"], *asked["system"], last]


@pytest.mark.parametrize("policy", ["longest_prefix", "dfs_weight"])
def test_where_all_has_room_they_go_by_arrival(policy: Policy) -> None:
    bench = Bench(running=1, policy=policy)
    bench.add(prompt(24), max_tokens=1)
    bench.drain()
    arrived = [
        bench.add(prompt(24, seed=1), max_tokens=1),
        bench.add([*prompt(24), 1], max_tokens=1),
        bench.add(prompt(24, seed=2), max_tokens=1),
        bench.add([*prompt(24), 2], max_tokens=1),
    ]
    bench.drain()
    assert list(bench.finished)[1:] == arrived


@pytest.mark.parametrize("policy", ["longest_prefix", "dfs_weight"])
def test_those_who_wait_are_ordered_anew_when_room_gets_short(policy: Policy) -> None:
    bench = Bench(running=1, policy=policy)
    bench.add(prompt(24), max_tokens=1)
    bench.drain()
    cold = [bench.add(prompt(24, seed=seed), max_tokens=1) for seed in (1, 2)]
    hot = bench.add([*prompt(24), 1], max_tokens=1)
    bench.step()
    last = bench.press()
    bench.drain()
    assert list(bench.finished)[1:] == [cold[0], hot, cold[1], last]


def test_dfs_weight_orders_only_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(running=1, policy="dfs_weight")
    for seed in range(3 * WINDOW):
        bench.add(prompt(8, seed), max_tokens=1)
    walks = 0
    path = bench.scheduler.tree.path

    def counting(*arguments: object) -> object:
        nonlocal walks
        walks += 1
        return path(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.scheduler.tree, "path", counting)
    for _ in range(5):
        bench.step()
    assert 0 < walks <= 5 * (WINDOW + 1)
    bench.drain()
    assert len(bench.finished) == 3 * WINDOW
    bench.check_quiet()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_beyond_the_bound_whatever_the_policy(policy: Policy) -> None:
    """Hot requests, cheap and many, arrive for ever: what is cold is taken when it is overdue."""
    bench = Bench(blocks=32, running=2, policy=policy, starvation_s=20.0)
    hot = prompt(32)
    bench.add(hot)
    bench.drain()
    cold = bench.add(prompt(33, seed=1))
    start = bench.now
    for serial in range(200):
        bench.add([*hot, serial])
        bench.add([*hot, serial])
        bench.step()
        if cold in bench.finished:
            break
    assert bench.now - start <= 20 + 6  # the bound, and the two that ran already
    assert policy == "fcfs" or bench.now - start > 20  # it did have to wait


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_change_the_order_and_never_the_output(policy: Policy) -> None:
    outputs = []
    for chosen in (policy, "fcfs"):
        bench = Bench(blocks=40, running=4, policy=chosen, context=120)
        for serial in range(30):
            shared = prompt(8 * (serial % 4), seed=serial % 3)
            bench.add([*shared, *prompt(9, seed=serial)], max_tokens=serial % 9 + 1)
            bench.step()
        bench.drain()
        bench.check_quiet()
        outputs.append(bench.tokens)
    assert outputs[0] == outputs[1]


def resident(bench: Bench, tokens: list[int]) -> int:
    return bench.scheduler.tree.resident(SPACE, array("I", tokens).tobytes(), len(tokens))


def test_prompts_that_come_once_do_not_sweep_out_what_is_used() -> None:
    bench = Bench(blocks=128)
    hot = prompt(40, seed=99)
    for serial in range(2):
        bench.add([*hot, serial], max_tokens=1)
        bench.drain()
    for seed in range(80):
        bench.add(prompt(40, seed), max_tokens=1)
        bench.drain()
    assert bench.scheduler.tree.evicted > 64
    assert resident(bench, hot) == 40


def test_what_was_found_again_once_does_not_stay_for_ever() -> None:
    """Proven branches give way too, by last use, to others that are proven."""
    bench = Bench(blocks=64)
    for seed in range(20):
        for serial in range(2):
            bench.add([*prompt(40, seed), serial], max_tokens=1)
            bench.drain()
    assert resident(bench, prompt(40, seed=0)) == 0
    assert resident(bench, prompt(40, seed=19)) == 40


def test_unproven_counts_the_blocks_on_probation() -> None:
    bench = Bench(blocks=64)
    tree = bench.scheduler.tree
    bench.add(prompt(24), max_tokens=1)
    bench.drain()
    assert (tree.size, tree.unproven) == (6, 6)
    bench.add([*prompt(12), *prompt(12, seed=1)], max_tokens=1)
    bench.drain()
    assert (tree.size, tree.unproven) == (9, 6)  # three blocks are shared and proven
    bench.add(prompt(24), max_tokens=1)
    bench.drain()
    assert tree.unproven == 6 - 2  # all of it but the block that holds the last token
    bench.scheduler.flush(bench.now)
    assert (tree.size, tree.unproven) == (0, 0)
    assert SIZE == 4


@pytest.mark.parametrize(("policy", "first"), [("least_uncached", 2), ("longest_prefix", 1)])
def test_a_short_prompt_goes_before_the_rest_of_a_long_one(policy: Policy, first: int) -> None:
    bench = Bench(policy=policy, chunk=32)
    bench.add(prompt(150, 1))
    bench.step()
    bench.add(prompt(20, 2))
    while not (begun := {id for id, tokens in bench.tokens.items() if tokens}):
        bench.step()
    assert begun == {first}


def test_a_long_prompt_that_is_overdue_is_not_held_up() -> None:
    bench = Bench(policy="least_uncached", chunk=32, starvation_s=3.0)
    long = bench.add(prompt(150, 1))
    for seed in range(2, 40):
        bench.step()
        bench.add(prompt(40, seed))
        if bench.tokens[long]:
            break
    assert bench.now <= 3.0 + 2 + 150 // 32
