"""Room in a replica's cache: what is known of it, and what follows from that."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_fleet_scheduler import SIZE, Told, World, job

from router.fleet.memory import CROSSING, FULL, RECENT, Memory
from router.schedule.policies.hotbranch import Hotbranch

TOTAL = 1000


def test_without_a_report_there_is_room() -> None:
    memory = Memory()
    memory.sent(1, 1 << 40)
    assert memory.room == inf and memory.wait_s(1 << 40, 1.0) == 0
    memory.reported(7, 0)  # a replica that does not say how much it has
    assert memory.total == inf and memory.room == inf


def test_what_was_sent_counts_until_a_report_surely_does() -> None:
    memory = Memory()
    memory.reported(600, TOTAL)
    memory.sent(1, 100)
    assert memory.used == 700
    memory.reported(600, TOTAL)  # it may have left before the request was admitted
    assert memory.used == 700
    memory.reported(690, TOTAL)
    assert memory.used == 690
    memory.ended(1, 10)
    memory.ended(1, 10)
    assert memory.used == 690 - 110
    memory.reported(580, TOTAL)
    assert memory.used == 580


def test_what_a_report_says_is_of_all_ranks_of_a_replica() -> None:
    world = World()
    (server,) = world.servers
    told = Told(used_blocks=60, total_blocks=100)
    world.scheduler.reported(server, told, 0.0, ranks=2)
    assert (server.memory.used, server.memory.total) == (30 * SIZE, 50 * SIZE)


def test_what_never_ran_frees_nothing_that_a_report_counts() -> None:
    memory = Memory()
    memory.reported(600, TOTAL)
    memory.sent(1, 100)
    memory.ended(1, 0)
    assert memory.used == 600
    memory.sent(2, 100)
    for _ in range(CROSSING):
        memory.reported(600, TOTAL)  # it waits there
    memory.ended(2, 0)
    assert memory.used == 600


def test_the_wait_for_room_is_what_is_over_at_the_pace_at_which_what_runs_ends() -> None:
    memory = Memory()
    for id, generated in enumerate((20, 0, 40)):
        memory.sent(id, 0)
        memory.ended(id, generated)
    assert memory.generated == pytest.approx(20 + RECENT * 20)
    memory.reported(500, TOTAL)
    assert memory.wait_s(FULL * TOTAL - 500, 0.1) == 0
    # 95 tokens too many; a step frees a 21st of the 950
    assert memory.wait_s(FULL * TOTAL - 405, 0.1) == pytest.approx(2.1 * 0.1)
    memory.reported(0, TOTAL)
    assert memory.wait_s(FULL * TOTAL + 95, 0.1) == pytest.approx(2.1 * 0.1), "it fills till then"


class MemoryMachine(RuleBasedStateMachine):
    """A replica that admits in its next step, and reports that arrive a step late."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.runs: dict[int, int] = {}  # what the replica keeps
        self.ids = 0
        self.late = 0

    @rule(tokens=st.integers(0, 300))
    def send(self, tokens: int) -> None:
        self.ids += 1
        self.runs[self.ids] = tokens
        self.memory.sent(self.ids, tokens)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.runs)))
        del self.runs[id]
        self.memory.ended(id, 1)

    @rule()
    def report(self) -> None:
        self.memory.reported(self.late, TOTAL)
        self.late = sum(self.runs.values())

    @invariant()
    def nothing_is_subtracted_twice(self) -> None:
        assert self.memory._coming >= 0
        assert set(self.memory._sent) == set(self.runs)

    def teardown(self) -> None:
        for _ in range(CROSSING + 1):
            self.report()
        assert self.memory.used == sum(self.runs.values())
        for id in self.runs:
            self.memory.ended(id, 1)
        assert self.memory.used == 0 and not self.memory._sent


MemoryMachine.TestCase.settings = settings(max_examples=100, deadline=None)
TestMemory = MemoryMachine.TestCase


def test_a_job_waits_here_until_the_cache_there_has_room() -> None:
    world = World()
    (server,) = world.servers
    assert world.arrive(job(0, 1)) == [0]
    server.outstanding.settled(0)
    told = Told(running=1, used_blocks=95, total_blocks=100)
    world.scheduler.reported(server, told, 0.0)
    world.scheduler.reported(server, told, 0.0)
    assert world.arrive(job(1, *range(10, 13))) == []  # it would be sent, by its prefill
    world.scheduler.reported(server, Told(running=1, used_blocks=90, total_blocks=100), 0.0)
    assert [out.job.id for out in world.scheduler.pump(server, 0.0)] == [1]


def test_what_is_larger_than_the_room_goes_where_nothing_runs() -> None:
    world = World()
    (server,) = world.servers
    world.scheduler.reported(server, Told(total_blocks=4), 0.0)
    assert world.arrive(job(0, *range(8))) == [0]


def test_an_idle_server_without_room_steals_nothing_and_one_with_room_does() -> None:
    for used, stolen in ((96, 0), (10, 1)):
        world = World(Hotbranch(), 2, steals=True)
        here, other = world.servers
        for server in world.servers:
            server.memory.generated = 100.0
        for turn in range(2):
            for server in world.servers:
                told = Told(running=1, used_blocks=96, total_blocks=100)
                world.scheduler.reported(server, told, float(turn))
        first = job(0, *range(3))
        for server in world.servers:
            server.sent[99] = first, 0.0  # something runs at both
        assert world.arrive(job(1, *range(3))) == []
        at = world.scheduler.waiting[1]
        idle = other if at is here else here
        world.scheduler.reported(idle, Told(running=1, used_blocks=used, total_blocks=100), 2.0)
        outs = world.scheduler.pump(idle, 2.0)
        assert world.scheduler.stolen == len(outs) == stolen


def test_a_prompt_goes_where_there_is_room_and_not_where_it_would_wait_for_it() -> None:
    for full in (0, 1):
        world = World(Hotbranch(), 2)
        for number, server in enumerate(world.servers):
            server.memory.generated = 100.0
            used = 96 if number == full else 50
            world.scheduler.reported(server, Told(running=1, used_blocks=used, total_blocks=100), 0)
        (out,) = world.scheduler.arrive(job(1, *range(3)), 0.0)
        assert out.server is world.servers[1 - full]


def test_what_is_overdue_goes_although_the_cache_is_full() -> None:
    world = World(starvation_s=5.0)
    (server,) = world.servers
    assert world.arrive(job(0, 1)) == [0]
    for _ in range(2):
        world.scheduler.reported(server, Told(running=1, used_blocks=99, total_blocks=100), 0.0)
    assert world.arrive(job(1, 2)) == world.scheduler.pump(server, 4.0) == []
    assert [out.job.id for out in world.scheduler.pump(server, 5.1)] == [1]
