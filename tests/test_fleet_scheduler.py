"""Placing, holding and dispatching, under a clock of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.holder import Holder
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.scheduler import Dispatch, FleetScheduler, Placement, Rules
from router.schedule.server import Server

SIZE, CHUNK = 16, 160
HOLDERS = [Holder("a"), Holder("b"), Holder("c")]
Path = tuple[int, ...]


def keys(path: Path) -> list[int]:
    return [hash(path[: end + 1]) for end in range(len(path))]


def job(id: int, *path: int, arrived: float = 0.0, tenant: str = "") -> Job:
    """Its blocks, and a token behind them."""
    return Job(id, len(path) * SIZE + 1, {SIZE: keys(path)}, arrived, tenant)


@dataclass
class First:
    """Everything is for the first server."""

    holds: bool = True
    log: list[str] = field(default_factory=list)

    def choose(
        self, job: Job, servers: Sequence[Server], matched: Mapping[Holder, int], now: float
    ) -> Placement:
        return Placement(servers[0], "first")

    def sent(self, job: Job, server: Server, now: float) -> None:
        self.log.append(f"sent {job.id}")

    def ended(self, job: Job, server: Server, now: float) -> None:
        self.log.append(f"ended {job.id}")


@dataclass(frozen=True)
class Told:
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    step_s: float = 0.01
    prefill_s_per_token: float = 0.001
    used_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0


class World:
    """A scheduler, the index below it, and what was dispatched."""

    def __init__(self, policy: object = None, count: int = 1, **rules: object) -> None:
        self.index = Index()
        self.policy = policy or First()
        self.scheduler = FleetScheduler(
            self.index,
            self.policy,  # type: ignore[arg-type]
            Rules(**{"steals": False} | rules),  # type: ignore[arg-type]
            {},
        )
        self.servers = []
        for holder in HOLDERS[:count]:
            self.index.add(holder, SIZE, 1000)
            self.index.replace(holder, [], 0.0)
            self.scheduler.add(holder, SIZE, CHUNK)
            self.servers.append(self.scheduler.servers[holder])
            self.scheduler.reported(self.servers[-1], Told(), 0.0)

    def holds(self, at: int, *path: int) -> None:
        self.index.store(HOLDERS[at], None, keys(path), 0.0)

    def arrive(self, *jobs: Job, now: float = 0.0) -> list[int]:
        return [out.job.id for asked in jobs for out in self.scheduler.arrive(asked, now)]

    def begin(self, out: Dispatch, cached: int, now: float) -> list[Dispatch]:
        self.scheduler.began(out.job, out.server, out.matched, cached, now)
        return self.scheduler.pump(out.server, now)


def test_a_policy_that_does_not_hold_sends_at_once() -> None:
    world = World(First(holds=False))
    assert world.arrive(*(job(i, i, 1, 2, 3, 4, 5, 6, 7) for i in range(5))) == [0, 1, 2, 3, 4]


def test_a_server_has_a_window_of_chunks_ahead_and_the_rest_waits() -> None:
    world = World(window=2.0)
    # two chunks are 320 tokens: three jobs of 129 reach them
    assert world.arrive(*(job(i, i, 1, 2, 3, 4, 5, 6, 7) for i in range(5))) == [0, 1, 2]
    assert set(world.scheduler.waiting) == {3, 4}


def test_a_slow_server_has_less_than_a_chunk_ahead() -> None:
    world = World(window=1.0)
    world.scheduler.reported(world.servers[0], Told(prefill_s_per_token=0.005), 2.0)
    # it computes a hundred tokens in half a second
    assert world.arrive(*(job(i, i, 1, 2, 3) for i in range(3))) == [0, 1]


def test_what_begins_makes_room_for_what_waits() -> None:
    world = World(window=1.0)
    first = world.scheduler.arrive(job(0, *range(12)), 0.0)[0]
    assert world.arrive(job(1, *range(20, 36)), job(2, *range(40, 53))) == []
    outs = world.begin(first, 0, 1.0)
    assert [out.job.id for out in outs] == [2]
    assert [out.job.id for out in world.begin(outs[0], 0, 2.0)] == [1]
    assert world.scheduler.waiting == {}


def test_a_long_prompt_that_is_there_keeps_no_shorter_one_here() -> None:
    world = World(window=1.0)
    assert world.arrive(job(0, *range(40)), job(1, *range(50, 95)), job(2, *range(100, 110))) == [
        0,
        2,
    ]
    assert world.arrive(job(3, *range(200, 210))) == []  # as long as the one before it


def test_siblings_of_what_goes_out_move_up_before_any_report() -> None:
    """The prefix that they share is on its way: only their own blocks are left to compute."""
    world = World(window=1.0)
    shared = tuple(range(12))
    first = world.scheduler.arrive(job(0, *shared, 90), 0.0)[0]
    some = job(1, *range(50, 70)), job(2, *shared, *range(20)), job(3, *shared, 92)
    assert world.arrive(*some) == [3]  # but for a block, it is on its way
    outs = world.begin(first, 0, 1.0)
    assert [out.job.id for out in outs] == [2]
    assert [out.job.id for out in world.begin(outs[0], 12, 2.0)] == [1]


def test_in_order_of_arrival_nothing_moves_up() -> None:
    world = World(window=1.0, order="arrival")
    shared = tuple(range(12))
    first = world.scheduler.arrive(job(0, *shared, 90), 0.0)[0]
    assert world.arrive(job(1, *range(50, 70)), job(2, *shared, 91), job(3, *shared, 92)) == []
    outs = world.begin(first, 0, 1.0)
    assert [out.job.id for out in outs] == [1]
    assert [out.job.id for out in world.begin(outs[0], 0, 2.0)] == [2, 3]


def test_who_waited_beyond_the_bound_goes_first_oldest_first() -> None:
    world = World(window=1.0, starvation_s=10.0)
    world.holds(0, 1, 2, 3)
    first = world.scheduler.arrive(job(0, *range(12)), 0.0)[0]
    world.arrive(job(1, *range(20, 32), arrived=1.0), job(2, *range(40, 52), arrived=2.0))
    world.arrive(job(3, 1, 2, 3, *range(60, 72), arrived=11.0), now=11.0)
    served = []
    for now in (11.5, 11.9, 12.1):
        (first,) = world.begin(first, first.matched, now)
        served.append(first.job.id)
    assert served == [1, 3, 2]


def test_a_match_that_was_lost_while_waiting_is_not_believed() -> None:
    world = World(window=1.0)
    world.holds(0, *range(40, 50))
    first = world.scheduler.arrive(job(0, *range(12)), 0.0)[0]
    world.arrive(job(1, *range(40, 62)), job(2, *range(70, 83)))
    world.index.evict(HOLDERS[0], keys(tuple(range(40, 50)))[::-1])
    outs = world.begin(first, 0, 1.0)
    assert [(out.job.id, out.matched) for out in outs] == [(2, 0)]
    outs = world.begin(outs[0], 0, 2.0)
    assert [(out.job.id, out.matched) for out in outs] == [(1, 0)]


def test_an_idle_server_takes_what_gains_most_from_the_longest_queue() -> None:
    world = World(count=2, window=1.0, steals=True)
    world.servers[1].outstanding.sent(99, 500)  # busy
    world.holds(1, *range(40, 52))
    world.arrive(*(job(i, 60 + i, *range(1, 12)) for i in range(3)), job(9, *range(40, 52)))
    assert set(world.scheduler.waiting) == {1, 2, 9} and world.scheduler.stolen == 0
    world.servers[1].outstanding.settled(99)
    outs = world.scheduler.pump(world.servers[1], 0.0)
    assert [(out.job.id, out.matched) for out in outs] == [(9, 12)]
    assert world.scheduler.stolen == 1


def test_nothing_moves_that_would_lose_more_than_it_waits() -> None:
    world = World(count=2, window=1.0, steals=True)
    world.arrive(job(0, *range(12)))
    assert world.arrive(job(1, *range(12), *range(50, 63))) == []  # half of it is on its way there
    assert world.scheduler.pump(world.servers[1], 0.0) == []
    outs = world.scheduler.arrive(job(2, *range(60, 74)), 0.0)
    assert [(out.job.id, out.server.holder, out.reason) for out in outs] == [
        (2, HOLDERS[1], "stolen")
    ]


def test_a_server_that_goes_gives_its_jobs_back() -> None:
    world = World(count=2, window=1.0)
    world.arrive(job(0, *range(12)), job(1, *range(20, 32)), job(2, *range(30, 42)))
    world.index.remove(HOLDERS[0])
    lost, outs = world.scheduler.remove(HOLDERS[0], 1.0)
    assert [gone.id for gone in lost] == [0]
    assert [(out.job.id, out.server.holder) for out in outs] == [(1, HOLDERS[1])]
    assert world.scheduler.waiting == {2: world.scheduler.servers[HOLDERS[1]]}
    world.index.remove(HOLDERS[1])
    lost, outs = world.scheduler.remove(HOLDERS[1], 1.0)
    assert sorted(gone.id for gone in lost) == [1, 2] and outs == []
    assert world.scheduler.waiting == {} and world.scheduler._reasons == {}
    assert world.scheduler._lacking == {} and world.scheduler._queues == {}


def test_a_job_that_waits_can_be_cancelled_once() -> None:
    world = World(window=1.0)
    gone = job(1, *range(20, 32))
    world.arrive(job(0, *range(12)), gone)
    assert world.scheduler.cancel(gone) and not world.scheduler.cancel(gone)
    assert world.scheduler.waiting == {} and world.servers[0].queue.tokens == 0


def test_one_token_is_always_computed() -> None:
    world = World()
    world.holds(0, 1, 2)
    exact = Job(0, 2 * SIZE, {SIZE: keys((1, 2))}, 0.0)
    assert world.scheduler.arrive(exact, 0.0)[0].matched == 1


def test_less_than_believed_is_taken_back() -> None:
    world = World()
    world.holds(0, 1)
    first = world.scheduler.arrive(job(0, 1, 2, 3), 0.0)[0]
    second = world.scheduler.arrive(job(1, 1, 2, 3), 0.0)[0]
    assert (first.matched, second.matched) == (1, 3)
    world.begin(second, 1, 1.0)
    assert world.scheduler.arrive(job(2, 1, 2, 3), 1.0)[0].matched == 1


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8), st.sampled_from("xy")),
        min_size=1,
        max_size=60,
    ),
    window=st.sampled_from((0.5, 1.0, 4.0)),
    count=st.integers(1, 3),
    policy=st.sampled_from((First, Hotbranch)),
)
def test_every_job_goes_out_once_and_nothing_is_left(
    arrivals: list[tuple[int, int, int, str]], window: float, count: int, policy: type
) -> None:
    world = World(policy(), count, window=window, steals=True, quantum=100.0)
    out: list[Dispatch] = []
    open_: list[Dispatch] = []
    now = 0.0

    def take(outs: list[Dispatch]) -> None:
        out.extend(outs)
        open_.extend(outs)

    for id, (shared, branch, tail, tenant) in enumerate(arrivals):
        now += 0.1
        path = (shared, *range(100, 104), branch, *range(200 + id, 200 + id + tail))
        take(world.scheduler.arrive(job(id, *path, arrived=now, tenant=tenant), now))
        if id % 3 == 2 and open_:
            done = open_.pop(0)
            take(world.begin(done, done.matched, now))
            world.scheduler.ended(done.job, done.server, now)
    while open_:
        now += 0.1
        done = open_.pop(0)
        take(world.begin(done, done.matched, now))
        world.scheduler.ended(done.job, done.server, now)
    assert sorted(sent.job.id for sent in out) == list(range(len(arrivals)))
    assert not world.scheduler.waiting and not world.scheduler._reasons
    assert not world.scheduler._lacking
    for server in world.servers:
        assert not server.sent and not len(server.queue) and server.queue.tokens == 0
        assert server.outstanding.tokens == 0
    assert not world.scheduler._shares._service


def test_what_was_generated_is_charged_twice_once() -> None:
    world = World()
    (out,) = world.scheduler.arrive(job(0, 1, 2, tenant="a"), 0.0)
    world.scheduler.ended(out.job, out.server, 0.5, 10)
    world.scheduler.ended(out.job, out.server, 0.5, 10)
    assert world.scheduler._shares._lately == {"a": 2 * SIZE + 1 + 2 * 10}


def test_a_tenant_over_its_share_leaves_room_and_the_others_pass_it_at_the_replica() -> None:
    world = World()
    for tenant, tokens in (("heavy", 500.0), ("light", 10.0)):
        world.scheduler._shares.charge(tenant, tokens, 0.0)
    world.arrive(job(0, *range(3), tenant="heavy"))
    heavy = job(1, *range(10, 14), tenant="heavy")
    assert world.arrive(heavy) == []  # 49 tokens are a quarter of the window
    (out,) = world.scheduler.arrive(job(2, 20, 21, 22, tenant="light"), 0.0)
    assert (out.job.id, out.rank) == (2, 0)
    for id in (0, 2):
        world.servers[0].outstanding.settled(id)
    world.scheduler.reported(world.servers[0], Told(used_blocks=60, total_blocks=100), 0.0)
    assert world.scheduler.pump(world.servers[0], 0.0) == []  # more than half of the cache
    (out,) = world.scheduler.pump(world.servers[0], 61.0)  # it is overdue
    assert (out.job.id, out.rank) == (1, 1)


@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0.0, 3.0),  # seconds since the one before
            st.integers(0, 2),  # what is shared
            st.integers(0, 30),  # blocks of its own
            st.sampled_from("xxxyz"),
            st.integers(-1, 1),
            st.sampled_from((None, None, None, "comes", "goes")),
        ),
        min_size=1,
        max_size=80,
    ),
    window=st.sampled_from((0.5, 1.0, 2.0)),
    steals=st.booleans(),
)
def test_nobody_waits_longer_than_the_bound_and_what_is_older_takes(
    arrivals: list[tuple[float, int, int, str, int, str | None]], window: float, steals: bool
) -> None:
    """Once a job is overdue, nothing that came after it goes out at its server before it."""
    bound = 5.0
    world = World(Hotbranch(), 2, window=window, steals=steals, quantum=300.0, starvation_s=bound)
    scheduler = world.scheduler
    busy: dict[Holder, float] = {}  # until when
    jobs: dict[int, Job] = {}
    served: set[int] = set()

    def take(outs: Sequence[Dispatch], now: float) -> None:
        for out in outs:
            served.add(out.job.id)
            waits = [jobs[id] for id, at in scheduler.waiting.items() if at is out.server]
            late = [one for one in waits if one.arrived < now - bound]
            assert all(out.job.arrived <= one.arrived for one in late)

    def until(end: float) -> None:
        """Each server computes one job after another, ten milliseconds a token."""
        while True:
            idle = [server for server in scheduler.servers.values() if server.sent]
            ends = {server: busy.setdefault(server.holder, now_of(server)) for server in idle}
            server = min(ends, key=lambda one: ends[one], default=None)
            if server is None or ends[server] > end:
                return
            now = ends[server]
            done, _ = next(iter(server.sent.values()))
            del busy[server.holder]
            scheduler.began(done, server, 0, 0, now)
            scheduler.ended(done, server, now, 3)
            clock[0] = max(clock[0], now)
            take(scheduler.pump(server, now), now)

    def now_of(server: Server) -> float:
        done, sent = next(iter(server.sent.values()))
        return max(sent, clock[0]) + done.tokens * 1e-2

    clock = [0.0]
    for id, (gap, shared, own, tenant, priority, change) in enumerate(arrivals):
        at = clock[0] + gap
        until(at)
        clock[0] = at
        if change == "goes" and len(scheduler.servers) > 1:
            gone = next(iter(scheduler.servers))
            world.index.remove(gone)
            busy.pop(gone, None)
            lost, outs = scheduler.remove(gone, at)
            served |= {one.id for one in lost}
            take(outs, at)
        if change == "comes" and HOLDERS[2] not in scheduler.servers:
            world.index.add(HOLDERS[2], SIZE, 1000)
            world.index.replace(HOLDERS[2], [], at)
            scheduler.add(HOLDERS[2], SIZE, CHUNK)
        path = (shared, *range(100, 104), *range(1000 * id, 1000 * id + own))
        size = len(path) * SIZE + 1
        jobs[id] = Job(id, size, {SIZE: keys(path)}, at, tenant, priority)
        take(scheduler.arrive(jobs[id], at), at)
    until(float("inf"))
    assert served == set(jobs) and not scheduler.waiting


@pytest.mark.parametrize("count", [2, 3])
def test_new_families_spread_and_each_stays_together(count: int) -> None:
    world = World(Hotbranch(), count, window=100.0)
    homes: dict[int, set[Holder]] = {}
    for id in range(120):
        family = id % 24
        for out in world.scheduler.arrive(job(id, 1, family, *range(3, 8), id), 0.0):
            homes.setdefault(family, set()).add(out.server.holder)
            world.begin(out, out.matched, 0.0)
            world.scheduler.ended(out.job, out.server, 0.0)
    assert all(len(where) == 1 for where in homes.values())
    assert len(set().union(*homes.values())) == count


def test_a_family_stays_together_while_its_first_prompt_waits() -> None:
    """Nobody has anything of it, and the server that it waits for has a longer queue by then."""
    world = World(Hotbranch(), 2, window=1.0)
    world.arrive(*(job(id, id, *range(1, 20)) for id in range(8)))
    family = [job(100 + id, 100, *range(200, 230), id) for id in range(12)]
    assert world.arrive(*family) == []
    assert len({world.scheduler.waiting[member.id].holder for member in family}) == 1


def test_a_policy_that_does_not_hold_tells_replicas_nothing_of_shares() -> None:
    for holds in (True, False):
        world = World(First(holds=holds), window=1e9)
        world.scheduler._shares.charge("light", 10.0, 0.0)
        world.scheduler._shares.charge("heavy", 500.0, 0.0)
        asked = replace(job(1, 1, tenant="heavy"), priority=2)
        (out,) = world.scheduler.arrive(asked, 0.0)
        assert out.rank == 4 + holds
