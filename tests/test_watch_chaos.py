"""Real cache streams that drop, delay, duplicate, reorder, are cut, and start anew."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import pytest
from chaos_replica import LEAVES, keys
from chaos_world import Site, World, site

from hotbranch.v1.cache_pb2 import CacheDelta, CacheUpdate, Evicted, Run, Snapshot
from router.fleet import watch
from router.index.view import RECOVERIES

SEEDS = 1000
TOGETHER = 64  # worlds, so that the pauses of one are the work of others
EVENTS = 50
FAULT = 0.1  # of the deltas

HANG_S = 120.0  # when a message is never applied, or a lost view never watched anew

T = TypeVar("T")


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # The script may leave a stream silent for as long as the other worlds take.
    monkeypatch.setattr(watch, "SILENCE_S", 600.0)
    async with site() as started:
        yield started


async def play(seeds: Iterable[int], script: Callable[[int], Awaitable[T]]) -> list[T]:
    """Play a script for every seed, many at a time. An error names its seed."""
    gate = asyncio.Semaphore(TOGETHER)

    async def one(seed: int) -> T:
        async with gate:
            try:
                async with asyncio.timeout(HANG_S):
                    return await script(seed)
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise

    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(one(seed)) for seed in seeds]
    return [task.result() for task in played]


async def chaos(here: Site, seed: int) -> World:
    """Up to three replicas and two routers, at odds."""
    world = World(seed, replicas=1 + seed % 3, routers=1 + seed // 3 % 2, fault=FAULT)
    async with here.running(world):
        await world.chaos(EVENTS)
    return world


@pytest.mark.slow
async def test_after_any_chaos_the_index_is_exact(here: Site) -> None:
    async def script(seed: int) -> Counter[str]:
        world = await chaos(here, seed)
        return sum((wire.view.recoveries for wire in world.wires), Counter())

    recoveries = sum(await play(range(SEEDS), script), Counter())
    assert recoveries.keys() == set(RECOVERIES) - {
        "rank",
        "gone",
        "inconsistent",
        "late",  # of upstreams alone
    }  # the chaos reached them all


async def test_a_seed_plays_the_same_alone_and_among_others(here: Site) -> None:
    async def script(seed: int) -> list[list[tuple[int, str]]]:
        return [wire.trace for wire in (await chaos(here, seed)).wires]

    together = await play(range(12), script)
    assert [await script(seed) for seed in range(3, 6)] == together[3:6]
    assert together[3] != together[9]  # of as many replicas and routers


@pytest.mark.parametrize(
    ("fault", "kind"), [("drop", "gap"), ("delay", "gap"), ("duplicate", "regression")]
)
async def test_field_report_10_a_sequence_gap_is_detected_and_recovered(
    here: Site, fault: str, kind: str
) -> None:
    async def script(seed: int) -> None:
        world = World(seed, replicas=2, routers=1)
        wire = world.wires[0]
        async with here.running(world):
            await world.begin()
            wire.faults = {fault: 1.0}
            wire.replica.step()
            wire.faults = {}
            wire.replica.step()
            await wire.receive_all()
            assert wire.view.recoveries == {kind: 1}
            assert not wire.view.current
            await world.quiet()
            assert wire.view.recoveries == {kind: 1}

    await play(range(20), script)


async def test_field_report_12_a_restart_leaves_no_ghosts_though_its_numbers_go_on(
    here: Site,
) -> None:
    """The worst case: no cut is seen, and the number of the new epoch's delta is the next one."""

    async def script(seed: int) -> bool:
        world = World(seed, replicas=2, routers=1)
        wire = world.wires[0]
        async with here.running(world):
            await world.begin()
            before = wire.replica.sequence
            wire.replica.begin()
            goes_on = wire.replica.sequence == before
            wire.replica.step()
            await wire.receive()
            assert not any(world.indexes[0].held_count(holder) for holder in wire.replica.holders)
            assert wire.view.recoveries == {"epoch": 1, "overtaken": 1}
            await world.quiet()
        return goes_on

    assert set(await play(range(30), script)) == {True, False}


async def test_field_report_13_a_reset_purges_with_its_first_message(here: Site) -> None:
    async def script(seed: int) -> bool:
        world = World(seed, replicas=2, routers=1)
        wire = world.wires[0]
        async with here.running(world):
            await world.begin()
            wire.replica.begin()
            wire.snapshot_again()
            await wire.receive()
            incomplete = bool(wire.stream)
            if incomplete:
                holders = wire.replica.holders
                assert not any(world.indexes[0].held_count(holder) for holder in holders)
            await wire.receive_all()
            world.check()
            assert wire.view.recoveries == {"epoch": 1}  # no other stream was needed
        return incomplete

    assert set(await play(range(30), script)) == {True, False}


async def test_field_report_16_eight_routers_know_the_same(here: Site) -> None:
    """Each behind bad streams of its own. Knowing the same, they hit as often as one."""

    async def script(seed: int) -> None:
        world = World(seed, replicas=2, routers=8, fault=FAULT)
        async with here.running(world):
            await world.chaos(EVENTS)
            for path in LEAVES:
                matches = [index.match(keys(path)) for index in world.indexes]
                for wire in world.wires:
                    for holder in wire.replica.holders:
                        assert len({match.depth(holder) for match in matches}) == 1

    await play(range(10), script)


@pytest.mark.parametrize("form", ["stored", "evicted", "snapshot"])
async def test_an_unknown_rank_costs_the_view_and_no_more(here: Site, form: str) -> None:
    async def script(seed: int) -> None:
        world = World(seed, replicas=2, routers=1)
        wire = world.wires[0]
        async with here.running(world):
            await world.begin()
            replica = wire.replica
            delta = CacheDelta(sequence=replica.sequence + 1)
            update = CacheUpdate(epoch=replica.epoch, delta=delta)
            rank = len(replica.holders)
            if form == "stored":
                update.delta.stored.append(Run(keys=keys(LEAVES[0]), rank=rank))
            elif form == "evicted":
                update.delta.evicted.append(Evicted(keys=keys(LEAVES[0]), rank=rank))
            else:
                run = Run(keys=keys(LEAVES[0]), rank=rank)
                update.snapshot.CopyFrom(Snapshot(runs=[run], last=True, sequence=7))
            wire.send(update)
            await wire.receive()
            assert wire.view.recoveries == {"rank": 1}
            await world.quiet()
            assert wire.view.recoveries == {"rank": 1}

    await play(range(5), script)


async def test_a_replica_that_is_gone_leaves_nothing(here: Site) -> None:
    world = World(0, replicas=2, routers=2)
    async with here.running(world):
        await world.begin()
    gone, stays = world.replicas
    index, other = world.indexes
    world.wires[0].view.close()
    assert world.wires[0].view.recoveries == {"gone": 1}
    assert [index.held_count(holder) for holder in gone.holders] == [0, 0]
    assert index.blocks == len(stays.matchable(0))
    assert [index.held(holder) for holder in stays.holders] == stays.held()
    assert [other.held(holder) for holder in gone.holders] == gone.held()
