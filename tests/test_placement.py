"""Where a prompt goes, by our own policy and its scheduler: pure, under a clock of its own."""

from collections import Counter
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.holder import Holder
from router.fleet.outstanding import Outstanding
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.policies.pace import DEAREST
from router.schedule.scheduler import Dispatch, FleetScheduler, Full, Late, Nowhere, Rules

SIZE = 16


@dataclass(frozen=True)
class Told:
    """A load report."""

    outstanding_tokens: int = 0
    prefill_s_per_token: float = 1e-3
    running: int = 0
    waiting: int = 0
    step_s: float = 0.0
    used_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0


class World:
    """Servers that our own policy chooses from; everything goes out at once."""

    def __init__(self, *names: str, ranks: int = 1, window: float = 1e9, most: float = inf) -> None:
        self.index = Index()
        rules = Rules(window=window, most_waiting=most)
        self.scheduler = FleetScheduler(self.index, Hotbranch(), rules, {})
        for name in names:
            for rank in range(ranks):
                holder = Holder(name, rank)
                self.index.add(holder, SIZE, 10_000)
                self.index.replace(holder, [], 0.0)
                self.scheduler.add(holder, SIZE, 160, room=100 * SIZE)
                self.told(name, Told(), rank)

    def told(self, name: str, told: Told, rank: int = 0, now: float = 0.0) -> None:
        server = self.scheduler.servers[Holder(name, rank)]
        self.scheduler.reported(server, told, now)  # type: ignore[arg-type]

    def holds(self, name: str, *path: int, rank: int = 0) -> None:
        self.index.store(Holder(name, rank), None, keys(path), 0.0)

    def place(self, asked: Job) -> Dispatch:
        """Where it goes; then as if it had never been there."""
        (out,) = self.scheduler.arrive(asked, 0.0)
        self.index.withdraw(out.server.holder, asked.keys[SIZE])
        self.scheduler.ended(asked, out.server, 0.0)
        return out

    def home(self, asked: Job) -> Holder:
        return self.place(asked).server.holder


def keys(path: tuple[int, ...]) -> list[int]:
    return [hash(path[: end + 1]) for end in range(len(path))]


def job(id: int, *path: int, **fields: object) -> Job:
    return Job(id, len(path) * SIZE + 1, {SIZE: keys(path)}, 0.0, **fields)  # type: ignore[arg-type]


def test_the_match_wins_when_loads_are_equal() -> None:
    world = World("a", "b", "c")
    world.holds("b", *range(30))
    out = world.place(job(1, *range(40)))
    assert (out.server.holder, out.reason, out.matched) == (Holder("b"), "match", 30)


def test_field_report_1_and_6_what_was_sent_since_a_report_counts() -> None:
    world = World("a", "b")
    for id in range(40):
        world.scheduler.arrive(job(id, id, *range(100, 130)), 0.0)
    sent = Counter(s.holder.replica for s in world.scheduler.servers.values() for _ in s.sent)
    assert min(sent.values()) >= 15


def test_field_report_2_a_miss_goes_by_load_and_not_to_the_smallest_tree() -> None:
    world = World("full", "empty")
    world.holds("full", *range(1000, 3000))
    world.told("empty", Told(outstanding_tokens=20_000))
    assert {world.home(job(id, id, *range(20))) for id in range(30)} == {Holder("full")}


def test_field_report_3_one_hot_replica_does_not_switch_affinity_off_for_others() -> None:
    world = World("hot", "b", "c")
    world.told("hot", Told(outstanding_tokens=100_000))
    world.holds("b", *range(30))
    assert world.home(job(1, *range(40))) == Holder("b")


def test_field_report_4_affinity_is_bounded_alike_with_two_replicas_and_hundreds() -> None:
    """A hot branch waits for its replica as long as its reuse saves more, however many others are
    idle, and at most as long as the dearest work is worth."""
    saved, own = 30 * SIZE, SIZE + 1
    for others in (1, 300):
        world = World("hot", *map(str, range(others)))
        world.holds("hot", *range(30))
        outs = [world.scheduler.arrive(job(id, *range(30), 100 + id), 0.0)[0] for id in range(200)]
        first = next(i for i, out in enumerate(outs) if out.server.holder != Holder("hot"))
        assert saved // own <= first <= (1 + DEAREST) * saved // own + 1


def test_field_report_5_sixteen_routers_do_not_bury_the_one_idle_replica() -> None:
    """All hear within one interval that it is idle. What they send it is bounded by their windows;
    what else they meant for it waits with them, and can still go elsewhere."""
    sent = 0
    for number in range(16):
        world = World("idle", "b", "c", window=1.0)
        for name in "bc":
            world.told(name, Told(outstanding_tokens=50_000))
        for id in range(20):
            world.scheduler.arrive(job(id, 100 * number + id, *range(99)), 0.0)
        idle = world.scheduler.servers[Holder("idle")]
        assert len(idle.queue) >= 15
        sent += idle.outstanding.tokens
    assert sent == 16 * 1601


def test_field_report_7_a_prefix_that_all_hold_carries_no_affinity() -> None:
    world = World("a", "b")
    for name in "ab":
        world.holds(name, *range(30))
    world.told("a", Told(outstanding_tokens=4000))
    assert {world.home(job(id, *range(30), 100 + id)) for id in range(20)} == {Holder("b")}


def test_field_report_8_load_is_tokens_and_not_requests() -> None:
    world = World("few-long", "many-short")
    world.told("few-long", Told(outstanding_tokens=60_000, running=2))
    world.told("many-short", Told(outstanding_tokens=2_000, running=40))
    assert {world.home(job(id, id, *range(20))) for id in range(30)} == {Holder("many-short")}


def test_field_report_9_a_hot_stream_does_not_starve_a_cold_request() -> None:
    world = World("a", window=1.0)
    world.holds("a", *range(30))
    server = world.scheduler.servers[Holder("a")]
    (running,) = world.scheduler.arrive(job(0, 900, *range(40)), 0.0)
    assert world.scheduler.arrive(job(1, 901, *range(40)), 0.0) == []
    now, id, order = 0.0, 2, [0]
    while 1 not in order and now < 100:
        for _ in range(20):  # more than it can compute, each with little of its own
            hot = Job(id, 31 * SIZE + 1, {SIZE: keys((*range(30), 1000 + id))}, now)
            outs = world.scheduler.arrive(hot, now)
            order += [out.job.id for out in outs]
            id += 1
        now += 1.0
        for done, _ in list(server.sent.values()):
            world.scheduler.began(done, server, 0, 0, now)
            world.scheduler.ended(done, server, now)
        order += [out.job.id for out in world.scheduler.pump(server, now)]
    assert running.job.id == 0 and len(order) > 100
    assert 60.0 < now <= 62.0


def test_noise_in_what_replicas_measure_does_not_empty_one_of_them() -> None:
    world = World("a", "b")
    world.told("b", Told(prefill_s_per_token=1.9e-3), now=5.0)
    world.told("a", Told(prefill_s_per_token=1.0e-3), now=10.0)
    world.told("b", Told(prefill_s_per_token=1.8e-3), now=10.1)  # between two looks at all
    assert len({server.prefill_s_per_token for server in world.scheduler.servers.values()}) == 1
    homes = Counter(world.home(job(id, id, *range(20))).replica for id in range(200))
    assert min(homes["a"], homes["b"]) > 60


def test_another_kind_of_machine_counts_as_what_it_is() -> None:
    world = World("a", "b", "slow")
    world.told("slow", Told(prefill_s_per_token=5e-3), now=5.0)
    speeds = {s.holder.replica: s.prefill_s_per_token for s in world.scheduler.servers.values()}
    assert speeds == {"a": 1e-3, "b": 1e-3, "slow": 5e-3}


def test_who_has_measured_nothing_counts_as_typical() -> None:
    world = World("a", "b")
    fresh = world.scheduler.add(Holder("c"), SIZE, 160)
    assert fresh.prefill_s_per_token == 1e-3


def test_what_begins_a_branch_does_not_go_where_caches_are_replaced_faster() -> None:
    world = World("a", "b")
    policy = world.scheduler._policy
    assert isinstance(policy, Hotbranch)
    homes = {id: world.home(job(id, id, *range(20))) for id in range(60)}
    for name, tokens in (("a", 1_300_000), ("b", 1_000_000)):
        world.told(name, Told(cached_blocks=950, total_blocks=1000))
        world.scheduler.servers[Holder(name)].stored.sent(tokens, 0.0)
    assert {world.home(job(id, id, *range(20))) for id in range(60)} == {Holder("b")}
    policy.pace._ours = 0.0  # one of many routers knows nothing of the sort
    assert {id: world.home(job(id, id, *range(20))) for id in range(60)} == homes
    policy.pace._ours = 1.0
    world.told("a", Told(cached_blocks=500, total_blocks=1000))  # it has room now
    assert {world.home(job(id, id, *range(20))) for id in range(60)} == {Holder("a")}
    world.told("b", Told(cached_blocks=500, total_blocks=1000))
    assert {id: world.home(job(id, id, *range(20))) for id in range(60)} == homes


def test_families_spread_and_each_stays() -> None:
    world = World(*"abcdefgh")
    homes = [world.home(job(id, id, *range(20))) for id in range(400)]
    assert homes == [world.home(job(id, id, *range(20))) for id in range(400)]
    assert len(set(homes)) == 8 and min(Counter(homes).values()) > 25


def test_ranks_of_one_replica_are_servers_of_their_own() -> None:
    world = World("a", ranks=4)
    world.holds("a", *range(30), rank=1)
    assert world.home(job(1, *range(40))) == Holder("a", 1)
    homes = Counter(world.home(job(id, id, *range(20))).rank for id in range(200))
    assert len(homes) == 4 and min(homes.values()) > 25


def test_a_prompt_goes_where_it_fits_and_where_it_has_not_been() -> None:
    world = World("a", "b")
    world.scheduler.servers[Holder("a")].room = 10 * SIZE
    assert world.home(job(1, *range(10))) == Holder("b")
    assert world.home(job(2, *range(9), avoids=frozenset("b"))) == Holder("a")
    # where it fits nowhere, one says why
    assert world.home(job(3, *range(200), avoids=frozenset("b"))) == Holder("a")
    with pytest.raises(Nowhere):
        world.scheduler.arrive(job(4, 1, avoids=frozenset("ab")), 0.0)
    with pytest.raises(Nowhere):
        world.scheduler.arrive(Job(5, 17, {32: [1]}, 0.0), 0.0)
    assert not world.scheduler.waiting


def test_a_prompt_goes_where_all_is_offered_that_it_needs() -> None:
    world = World("a", "b", window=1.0)
    rich = world.scheduler.add(Holder("c"), SIZE, 160, offers=frozenset(["x", "y"]))
    world.index.add(rich.holder, SIZE, 10_000)
    for id in range(1, 5):  # c gets a queue, and the others stay idle
        world.scheduler.arrive(job(id, id, *range(40), needs=frozenset(["x"])), 0.0)
    assert [*world.scheduler.waiting.values()] == [rich] * 3
    assert not world.scheduler.pump(world.scheduler.servers[Holder("a")], 1.0), "nothing to steal"
    with pytest.raises(Nowhere):
        world.scheduler.arrive(job(5, 1, needs=frozenset(["x", "z"])), 0.0)
    lost, _ = world.scheduler.remove(rich.holder, 2.0)
    assert {one.id for one in lost} == {1, 2, 3, 4}


def test_no_more_wait_than_may() -> None:
    world = World("a", window=1.0, most=2)
    for id in range(3):
        world.scheduler.arrive(job(id, id, *range(20)), 0.0)
    with pytest.raises(Full) as full:
        world.scheduler.arrive(job(3, 3, *range(20)), 0.0)
    assert full.value.seconds == pytest.approx(3 * 337 * 1e-3)  # one that was sent, two that wait
    assert len(world.scheduler.waiting) == 2


def test_what_would_be_late_is_refused_at_once() -> None:
    world = World("a", "b", window=1.0)
    for name in "ab":
        world.told(name, Told(outstanding_tokens=2000))
    with pytest.raises(Late):
        world.scheduler.arrive(job(1, *range(20), deadline=2.0), 0.0)
    world.told("b", Told(outstanding_tokens=1000))
    world.scheduler.arrive(job(2, *range(20), deadline=2.0), 0.0)
    assert list(world.scheduler.waiting) == [2]


def test_what_waits_of_a_tenant_over_its_share_is_not_before_the_others() -> None:
    """One job of 641 tokens is being computed, nine wait: .641 s each."""
    world = World("a", window=1.0)
    world.place(job(0, 0, tenant="light"))
    for id in range(1, 11):
        world.scheduler.arrive(job(id, id, *range(39), tenant="heavy"), 0.0)
    long = 11, *range(100, 179)  # 1.281 s, so that by work alone it would go last
    with pytest.raises(Late):
        world.scheduler.arrive(job(11, *long, tenant="heavy", deadline=3.0), 0.0)
    world.scheduler.arrive(job(12, *long, tenant="light", deadline=3.0), 0.0)
    (server,) = world.scheduler.servers.values()
    assert server.first_token_s(1281, over=False) == pytest.approx(0.641 + 1.281 / 2 + 1.281)
    assert server.first_token_s(1281, over=True) == pytest.approx(0.641 * 10 + 1.281 * 2)


@given(
    matched=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    ahead=st.lists(st.integers(0, 50_000), min_size=3, max_size=3),
)
def test_a_choice_costs_at_most_what_it_saves_more_than_the_cheapest(
    matched: list[int], ahead: list[int]
) -> None:
    world = World(*"abc"[: len(matched)])
    for name, blocks, tokens in zip("abc", matched, ahead, strict=False):
        world.holds(name, *range(blocks))
        world.told(name, Told(outstanding_tokens=tokens))
    costs = {
        Holder(name): world.scheduler.servers[Holder(name)].cost_s(641 - blocks * SIZE)
        for name, blocks in zip("abc", matched, strict=False)
    }
    out = world.place(job(1, *range(40)))
    if out.reason in ("match", "cost"):
        cheapest = min(costs, key=lambda holder: costs[holder])
        most = DEAREST * (max(matched) - min(matched)) * SIZE * 1e-3
        assert costs[out.server.holder] <= costs[cheapest] + most + 1e-9


def test_outstanding_adds_what_was_sent_since_the_report() -> None:
    outstanding = Outstanding()
    outstanding.sent(1, 500)
    outstanding.reported(700)
    assert outstanding.tokens == 700
    outstanding.sent(2, 300)
    assert outstanding.tokens == 1000
    outstanding.settled(2)
    outstanding.settled(2)
    assert outstanding.tokens == 700
    outstanding.settled(1)
    outstanding.reported(0)
    assert outstanding.tokens == 0


def test_outstanding_is_never_below_our_own_work() -> None:
    outstanding = Outstanding()
    outstanding.sent(1, 500)
    outstanding.reported(0)  # left the replica before it saw the request
    assert outstanding.tokens == 500


def test_outstanding_counts_down_as_the_replica_computes_and_forgets_what_is_done() -> None:
    outstanding = Outstanding()
    outstanding.sent(1, 800)
    outstanding.reported(800)
    outstanding.sent(2, 100)
    outstanding.reported(500)  # of the first; the second may have met this report on the way
    assert outstanding.tokens == 600
    assert outstanding.before(100) == 100
    outstanding.settled(1)
    assert outstanding.tokens == 100, "no old report makes it look busy with what is done"
    outstanding.reported(700)  # 600 of another router
    assert outstanding.tokens == 700
    outstanding.settled(2)
    assert outstanding.tokens == 600


@pytest.mark.parametrize(("step_s", "home"), [(0.01, "a"), (0.025, "a"), (0.05, "b")])
def test_a_crowd_counts_by_how_much_longer_it_makes_a_step(step_s: float, home: str) -> None:
    world = World("a", "b")
    world.holds("a", *range(20))
    world.told("a", Told(running=30, step_s=step_s))
    world.told("b", Told(step_s=0.01))
    assert world.place(job(1, *range(40))).server.holder.replica == home


def test_a_step_that_was_long_while_many_ran_is_no_crowd_once_they_are_gone() -> None:
    world = World("a", "b")
    world.holds("a", *range(20))
    world.told("a", Told(running=1, step_s=0.01))
    world.told("b", Told(step_s=0.05))  # nothing runs there
    assert world.place(job(1, *range(40))).server.holder.replica == "a"
    policy = world.scheduler._policy
    assert isinstance(policy, Hotbranch) and policy.pace.step_s == 0


def test_a_burst_of_one_tenant_does_not_make_others_late() -> None:
    """All of it was filed before any of it was charged."""
    world = World("a", window=1.0)
    world.place(job(0, 0, tenant="light"))
    for id in range(1, 11):
        world.scheduler.arrive(job(id, id, *range(39), tenant="heavy"), 0.0)
    (server,) = world.scheduler.servers.values()
    world.scheduler._shares.charge("heavy", 1e6, 0.0)
    world.scheduler.pump(server, 0.0)
    assert server.queue.before(1281, over=False) == 0
