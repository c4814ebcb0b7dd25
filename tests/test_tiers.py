"""Blocks below the GPU: what the index knows of them, and what they are worth to the scheduler."""

from collections import Counter
from collections.abc import Callable
from math import inf

import pytest
from gated_replica import MODEL
from hypothesis import given
from hypothesis import strategies as st
from test_baselines import fleet, job, server
from test_fleet import eventually
from test_fleet import prompt as live_prompt
from test_placement import Told, World, keys
from test_placement import job as asked
from test_router_metrics import metrics_of, samples
from told_replica import told_fleet

from hotbranch.keys import block_keys, root
from hotbranch.v1.cache_pb2 import (
    TIER_CPU,
    TIER_DISK,
    TIER_GPU,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Run,
    Snapshot,
    Tier,
)
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.index.index import Index
from router.index.tiers import Tiers
from router.index.view import View
from router.schedule.job import Job
from router.schedule.policies import POLICIES
from router.schedule.policies.dynamo_linear import DynamoLinear
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.reuse import Reuse
from router.schedule.scheduler import Dispatch, FleetScheduler, Rules

GPU, CPU, DISK = Holder("r"), Holder("r", 0, TIER_CPU), Holder("r", 0, TIER_DISK)
CHAIN = [10, 11, 12, 13]
blocks = st.integers(0, 1000)


class Listener:
    """An index that hears of one replica."""

    def __init__(self) -> None:
        self.index = Index()
        self.view = View(self.index, "r", Counter())
        self.view.connected(Description(block_size=16, ranks=1), comparable=True)
        self.view.restart()
        self.sequence = 0

    def snapshot(self, *runs: Run) -> None:
        snapshot = Snapshot(runs=runs, last=True, sequence=self.sequence)
        self.view.apply(CacheUpdate(epoch=1, snapshot=snapshot), 0.0)

    def delta(self, *parts: Run | Evicted) -> None:
        self.sequence += 1
        change = CacheDelta(
            sequence=self.sequence,
            stored=[part for part in parts if isinstance(part, Run)],
            evicted=[part for part in parts if isinstance(part, Evicted)],
        )
        self.view.apply(CacheUpdate(epoch=1, delta=change), 0.0)

    def depths(self) -> tuple[int, int, int]:
        match = self.index.match(CHAIN)
        return match.depth(GPU), match.depth(CPU), match.depth(DISK)


def run(*keys: int, tier: Tier = TIER_GPU) -> Run:
    return Run(parent=keys[0] - 1 if keys[0] > 10 else None, keys=keys, tier=tier)


def gone(*keys: int, tier: Tier = TIER_GPU) -> Evicted:
    return Evicted(keys=keys, tier=tier)


@pytest.fixture
def told() -> Listener:
    return Listener()


def test_a_lower_tier_goes_on_where_the_gpu_ends(told: Listener) -> None:
    told.snapshot(run(10, 11), run(12, tier=TIER_CPU), run(13, tier=TIER_DISK))
    assert told.depths() == (2, 3, 4)
    assert told.index.held(GPU) == {10, 11}
    told.delta(gone(11))
    assert told.depths() == (1, 1, 1), "what is below a gap cannot be loaded either"
    told.delta(run(11, tier=TIER_DISK))
    assert told.depths() == (1, 1, 4)
    told.delta(run(11, tier=TIER_CPU))
    assert told.depths() == (1, 3, 4)


def test_a_block_is_there_until_the_last_tier_has_evicted_it(told: Listener) -> None:
    told.snapshot(run(10, 11), run(10, 11, tier=TIER_CPU))
    told.delta(gone(11, 10))
    assert told.depths() == (0, 2, 0)
    told.delta(run(10), gone(11, 10, tier=TIER_CPU))
    assert told.depths() == (1, 1, 0)
    told.delta(gone(10))
    assert told.depths() == (0, 0, 0)


def test_a_tier_that_is_new_knows_what_lies_above_it_every_copy_of_it(told: Listener) -> None:
    told.snapshot(run(10), run(10), run(12))
    told.delta(run(11, tier=TIER_CPU))
    assert told.view.current and not told.view.recoveries, "no view is lost for it"
    assert told.depths() == (1, 3, 0)
    told.delta(gone(10))
    assert told.depths() == (1, 3, 0)
    told.delta(run(13, tier=TIER_DISK))
    assert told.depths() == (1, 3, 4)
    told.delta(gone(10))
    assert told.depths() == (0, 0, 0)
    assert told.index.held(DISK) == {11, 12, 13}


def test_a_snapshot_without_lower_tiers_empties_them(told: Listener) -> None:
    told.snapshot(run(10), run(11, tier=TIER_CPU))
    told.snapshot(run(10))
    assert told.depths() == (1, 1, 0)
    told.view.close()
    assert (told.index.blocks, told.index.held(CPU)) == (0, frozenset())


def test_a_rank_that_holds_nothing_holds_nothing_below_and_may_come_back() -> None:
    index = Index()
    rank = Tiers(index, GPU)
    for forget in (rank.clear, lambda: rank.add(16, 100), rank.clear):
        rank.add(16, 100)
        rank.store(TIER_CPU, None, CHAIN, 0.0)
        assert index.match(CHAIN).depths() == {CPU: 4}
        forget()
        assert index.blocks == 0
        rank.evict(TIER_CPU, CHAIN)
        rank.store(TIER_GPU, None, CHAIN, 0.0)
        assert index.match(CHAIN).depth(GPU) == 4
    rank.remove()
    rank.remove()
    assert (index.blocks, index.match(CHAIN).depths()) == (0, {})


def test_a_tier_that_this_router_does_not_know_is_nothing(told: Listener) -> None:
    told.snapshot(run(10), run(11, tier=7))  # type: ignore[arg-type]
    told.delta(run(12, tier=9), gone(10, tier=-1))  # type: ignore[arg-type]
    assert told.index.match(CHAIN).depths() == {GPU: 1}
    assert told.index.blocks == 1


def test_what_lies_lower_is_no_heat_and_no_replica(told: Listener) -> None:
    told.snapshot()
    told.delta(run(10, 11), run(10, 11, tier=TIER_CPU), Run(keys=[50], tier=TIER_CPU))
    (branch,) = told.index.hottest(9, 0.0)
    assert branch.held == {GPU: 2 * 16} and branch.rates.keys() == {GPU}
    alone = Listener()
    alone.snapshot()
    alone.delta(run(10, 11))
    assert [branch.rate] == [other.rate for other in alone.index.hottest(9, 0.0)]


@given(blocks, blocks, blocks)
def test_what_can_be_loaded_is_worth_more_than_nothing_and_less_than_what_is_there(
    gpu: int, cpu: int, disk: int
) -> None:
    reuse = Reuse(gpu, cpu, disk)
    assert gpu <= reuse.worth <= reuse.blocks == gpu + cpu + disk
    assert reuse.worth < reuse.blocks or not cpu + disk
    assert Reuse(gpu + 8, cpu, disk).worth > Reuse(gpu, cpu + 8, disk).worth
    assert Reuse(gpu, cpu + 8, disk).worth > Reuse(gpu, cpu, disk + 8).worth
    assert Reuse(gpu, cpu, disk + 8).worth > reuse.worth


@given(blocks, blocks, blocks)
def test_a_server_reuses_each_block_from_the_highest_tier_that_has_it(
    gpu: int, cpu: int, disk: int
) -> None:
    """A prediction lets the GPU have more than was reported of all tiers."""
    reuse = server("r").reuse({GPU: gpu, CPU: cpu, DISK: disk, Holder("s"): 2000})
    assert (reuse.gpu, reuse.gpu + reuse.cpu) == (gpu, max(gpu, cpu))
    assert reuse.blocks == max(gpu, cpu, disk)


class Loading(World):
    """Servers that our own policy chooses from, some with blocks in lower tiers."""

    def below(self, name: str, *path: int, tier: Tier = TIER_CPU) -> None:
        holder = Holder(name, 0, tier)
        self.index.add(holder, 16)
        self.index.inherit(holder, Holder(name))
        self.index.store(holder, None, keys(path), 0.0)


def test_a_prefix_in_the_cpus_memory_draws_more_than_none_and_less_than_on_the_gpu() -> None:
    world = Loading("none", "disk", "cpu", "gpu")
    world.below("disk", *range(40), tier=TIER_DISK)
    for name, draws in (("disk", "disk"), ("cpu", "cpu"), ("gpu", "gpu")):
        if name == "cpu":
            world.below(name, *range(40))
        if name == "gpu":
            world.holds(name, *range(40))
        out = world.place(asked(1, *range(40), 99))
        assert (out.server.holder.replica, out.matched, out.reason) == (draws, 40, "match")


def test_the_gpu_wins_where_nobody_lacks_the_prefix_and_families_spread_there_too() -> None:
    world = Loading("a", "b")
    world.below("a", *range(40))
    world.holds("b", *range(40))
    homes = {world.home(asked(id, *range(40), id)).replica for id in range(20)}
    assert homes == {"b"}
    world.below("b", *range(40))
    world.index.clear(Holder("b"))
    homes = {world.home(asked(id, *range(40), id)).replica for id in range(20)}
    assert homes == {"a", "b"}, "by the first block that nobody has in any tier"


def test_what_is_loaded_counts_as_an_eighth_in_work_and_whole_in_memory() -> None:
    world = Loading("a")
    world.below("a", *range(40))
    (server,) = world.scheduler.servers.values()
    (out,) = world.scheduler.arrive(asked(1, *range(48)), 0.0)
    assert out.matched == 40
    assert server.outstanding.ours == (40 // 8 + 8) * 16 + 1
    assert server.memory.used == 48 * 16 + 1
    world.scheduler.arrive(asked(2, *range(40), 99), 0.0)
    assert server.outstanding.ours == (40 // 8 + 8) * 16 + 1 + 17, "it is on its way to the GPU"
    assert server.memory.used == 48 * 16 + 1 + 17


def test_the_last_token_of_a_prompt_is_computed_wherever_it_lies() -> None:
    world = Loading("a", "b")
    world.below("b", *range(40))
    assert world.place(asked(1, *range(40))).matched == 40
    whole = Job(2, 40 * 16, asked(2, *range(40)).keys, 0.0)
    assert world.place(whole).matched == 39


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "dynamo_linear"])
def test_the_policies_of_others_see_the_gpu_alone(name: str) -> None:
    """Dynamo's published rule knows more. The others choose the same with lower tiers and without
    them; ours does not."""
    chosen: list[list[tuple[str, str]]] = []
    for below in ({}, {Holder("b", 0, TIER_CPU): 9, Holder("c", 0, TIER_DISK): 9}):
        policy, servers = POLICIES[name](0), fleet("abc")
        picks = []
        for id in range(30):
            prompt = job(id, *range(9))
            placement = policy.choose(prompt, servers, {Holder("a"): 4, **below}, 0.0)
            picks.append((placement.server.holder.replica, placement.reason))
        chosen.append(picks)
    assert (chosen[0] == chosen[1]) == (name != "hotbranch")


def test_dynamo_credits_host_memory_and_disk_by_its_weights() -> None:
    """Of 16 blocks, as many everywhere in decode. Credits: a 4; b 2 + 0.75 * 4 = 5; c 0.25 * 16."""
    servers, prompt = fleet("abc"), job(1, *range(16), tail=0)
    matched = {
        Holder("a"): 4,
        Holder("b"): 2,
        Holder("b", 0, TIER_CPU): 6,
        Holder("c", 0, TIER_DISK): 16,
    }
    router = DynamoLinear(0)
    assert router.choose(prompt, servers, matched, 0.0).server is servers[1]
    matched[Holder("a")] = 5
    assert {
        router.choose(prompt, servers, matched, 0.0).server.holder.replica for _ in "1234567"
    } == {"a", "b"}
    del matched[Holder("a")]
    del matched[Holder("b", 0, TIER_CPU)]
    assert router.choose(prompt, servers, matched, 0.0).server is servers[2]


def test_a_match_in_a_lower_tier_that_was_lost_while_waiting_is_not_believed() -> None:
    scheduler, index, begin = waiting_room(asked(1, *range(40), 41), asked(4, *range(300, 315)))
    assert list(scheduler.waiting) == [1, 4]
    index.evict(CPU, keys(tuple(range(40)))[:8:-1])
    assert [(out.job.id, out.matched) for out in begin()] == [(4, 0)]
    assert scheduler.servers[GPU].queue.tokens == 41 * 16 + 1 - (9 * 7 // 8) * 16


def test_what_a_prompt_has_loaded_lies_ready_for_those_that_share_some_of_it() -> None:
    scheduler, _, begin = waiting_room(asked(1, *range(45)), asked(4, *range(20), *range(300, 330)))
    queue = scheduler.servers[GPU].queue
    assert queue.tokens == (5 + 5) * 16 + 1 + (3 + 30) * 16 + 1
    assert [out.job.id for out in begin()] == [1]
    assert queue.tokens == 30 * 16 + 1


def waiting_room(
    *jobs: Job,
) -> tuple[FleetScheduler, Index, Callable[[], list[Dispatch]]]:
    """Jobs that wait for one server, which has forty blocks in its CPU's memory; what it is sent
    once it has time."""
    index = Index()
    scheduler = FleetScheduler(index, Hotbranch(), Rules(window=1.0, steals=False), {})
    for holder in (GPU, CPU):
        index.add(holder, 16)
    server = scheduler.add(GPU, 16, 160)
    index.store(CPU, None, keys(tuple(range(40))), 0.0)
    ahead = [scheduler.arrive(asked(id, id, *range(200, 204)), 0.0)[0] for id in (2, 3)]
    assert not [out for job in jobs for out in scheduler.arrive(job, 0.0)]

    def begin() -> list[Dispatch]:
        for out in ahead:
            scheduler.began(out.job, server, 0, 0, 1.0)
        return scheduler.pump(server, 1.0)

    return scheduler, index, begin


def test_what_is_loaded_waits_for_room_on_the_gpu() -> None:
    world = Loading("a")
    world.below("a", *range(40))
    world.told("a", Told(total_blocks=60))  # 912 tokens
    (first,) = world.scheduler.arrive(asked(1, *range(100, 120)), 0.0)
    assert world.scheduler.arrive(asked(2, *range(40), 41), 0.0) == []
    world.scheduler.ended(first.job, first.server, 1.0)
    assert [out.job.id for out in world.scheduler.pump(first.server, 1.0)] == [2]


async def test_live_replicas_report_what_they_can_load() -> None:
    """Over gRPC: the prompt goes where it is loaded, and where it lies once it lies on a GPU."""
    async with told_fleet(3) as (live, (none, cpu, gpu)):
        prompt = live_prompt(1)
        path = block_keys(prompt.token_ids, 4, root(MODEL))
        none.hold()
        cpu.hold(Run(keys=path[:2]), Run(parent=path[1], keys=path[2:], tier=TIER_CPU))
        gpu.hold()
        below = Holder(cpu.address, 0, TIER_CPU)
        await eventually(lambda: live.index.held(below) == set(path))
        route = await live.generate(prompt)
        assert (route.replica_id, route.predicted_tokens) == (cpu.address, 40)
        assert [sent.predicted_tokens for sent in cpu.submits] == [40]

        cpu.hold(Run(keys=path, tier=TIER_CPU))
        gpu.hold(Run(keys=path))
        await eventually(lambda: live.index.held(Holder(gpu.address)) == set(path))
        live.index.expire(inf)
        await eventually(lambda: not live.index.held(Holder(cpu.address)))
        route = await live.generate(live_prompt(1, tail=1))
        assert (route.replica_id, route.predicted_tokens) == (gpu.address, 40)
        assert not none.submits and not live.recoveries

        metrics = samples(metrics_of(live))
        held = {
            told: metrics["hotbranch_replica_index_blocks_held", told.address]
            for told in (none, cpu, gpu)
        }
        assert held == {none: 0, cpu: 0, gpu: len(path)}
        assert metrics["hotbranch_replicas", "ready"] == 3
