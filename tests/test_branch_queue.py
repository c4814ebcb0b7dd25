"""The queue of a server against a list that is sorted each time."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.schedule.branch_queue import BranchQueue, Order
from router.schedule.job import Job
from router.schedule.reuse import Reuse
from router.schedule.shares import HALF_S, OVER, Shares

SIZE = 16
TENANTS = "xyz"


def job(
    id: int, *path: int, tail: int = 1, arrived: float = 0.0, tenant: str = "", **more: int
) -> Job:
    """Blocks named by their whole path, as keys are, and some tokens behind them."""
    keys = [hash(path[: end + 1]) for end in range(len(path))]
    return Job(id, len(path) * SIZE + tail, {SIZE: keys}, arrived, tenant, **more)


def queue(order: Order = "depth_first") -> BranchQueue:
    return BranchQueue(SIZE, Shares({}, 1e9), order)


def drained(waiting: BranchQueue, overdue_since: float = -1.0) -> list[int]:
    ids = []
    while (head := waiting.next(overdue_since)) is not None:
        waiting.remove(head[0])
        ids.append(head[0].id)
    return ids


def test_the_least_uncached_goes_first_of_equal_work_the_deeper_match_then_the_older() -> None:
    waiting = queue()
    waiting.file(job(1, 1, 2, 3), Reuse())
    waiting.file(job(2, 1, 2, 3, 4), Reuse(3))
    waiting.file(job(3, 5, arrived=1.0), Reuse())
    waiting.file(job(4, 5, 6, arrived=2.0), Reuse(1))
    waiting.file(job(5, 7, arrived=0.5), Reuse())
    assert drained(waiting) == [2, 4, 5, 3, 1]


def test_priority_is_stronger_and_the_overdue_are_strongest() -> None:
    waiting = queue()
    waiting.file(job(1, 1, arrived=5.0), Reuse(1))
    waiting.file(job(2, 1, 2, 3, arrived=3.0, priority=-1), Reuse())
    waiting.file(job(3, 1, 2, 3, 4, arrived=2.0), Reuse())
    waiting.file(job(4, 1, 2, 3, 4, arrived=1.0), Reuse())
    assert drained(waiting, overdue_since=2.5) == [4, 3, 2, 1]


def test_order_of_arrival_looks_at_nothing_else() -> None:
    waiting = queue("arrival")
    waiting.file(job(1, 1, 2, 3, arrived=0.0), Reuse())
    waiting.file(job(2, 1, arrived=1.0), Reuse(1))
    assert waiting.around(1) == (waiting.tokens, 0)
    assert drained(waiting) == [1, 2]


def test_those_below_a_block_are_found_and_move_up_when_it_comes() -> None:
    waiting = queue()
    long, other, sibling = job(1, 1, 2, 3), job(2, 9, 2), job(3, 1, 2, 4, 5)
    for waits in (long, other, sibling):
        waiting.file(waits, Reuse())
    first = sibling.keys[SIZE][0]
    assert waiting.below(first) == [long, sibling]
    for moved in waiting.below(first):
        waiting.file(moved, Reuse(2))
    assert waiting.below(first) == []
    assert waiting.below(sibling.keys[SIZE][2]) == [sibling]
    assert drained(waiting) == [1, 3, 2]


def test_what_is_to_be_loaded_moves_up_too_once_a_sibling_brings_it() -> None:
    """It costs a share of what it would cost to compute it."""
    waiting = queue()
    disk, cpu, little = job(1, *range(20), 1), job(2, *range(20), 2), job(3, *range(30, 36))
    waiting.file(disk, Reuse(2, 0, 16))
    waiting.file(cpu, Reuse(2, 16))
    waiting.file(little, Reuse())
    assert waiting.tokens == (15 + 5 + 6) * SIZE + 3
    assert waiting.below(cpu.keys[SIZE][2]) == [disk, cpu]
    assert drained(waiting) == [2, 3, 1]


def test_a_server_is_never_idle_for_the_sake_of_fairness() -> None:
    """The least served of all tenants may wait at another server."""
    shares = Shares({}, 10.0)
    here, there = BranchQueue(SIZE, shares), BranchQueue(SIZE, shares)
    here.file(job(1, 1, tenant="heavy"), Reuse())
    there.file(job(2, 1, tenant="light"), Reuse())
    shares.charge("heavy", 1000.0, 0.0)
    head = here.next(-1.0)
    assert head is not None and head[0].id == 1


def test_a_tenant_that_leads_by_more_than_the_quantum_waits_for_the_others() -> None:
    shares = Shares({"paid": 2.0}, 100.0)
    waiting = BranchQueue(SIZE, shares)
    for id, tenant in enumerate(("paid", "free", "paid", "free")):
        waiting.file(job(id, id, *([7] * (3 if tenant == "free" else 0)), tenant=tenant), Reuse())
    shares.charge("paid", 190.0, 0.0)  # 95 by its weight
    assert waiting.next(-1.0)[0].tenant == "paid"  # type: ignore[index]
    shares.charge("paid", 20.0, 0.0)
    assert waiting.next(-1.0)[0].tenant == "free"  # type: ignore[index]
    shares.charge("free", 10.0, 0.0)
    assert waiting.next(-1.0)[0].tenant == "paid"  # type: ignore[index]


def test_who_waited_for_nothing_has_earned_nothing() -> None:
    shares = Shares({}, 10.0)
    shares.entered("a")
    shares.charge("a", 1000.0, 0.0)
    shares.entered("b")  # as if it had been served as much
    shares.charge("b", 5.0, 200.0)  # what a had is long ago
    assert shares.eligible(["a", "b"]) == ["a", "b"]
    shares.charge("b", 6.0, 0.0)
    assert shares.eligible(["a", "b"]) == ["a"]
    shares.left("a")
    shares.left("b")
    assert not shares._service


def test_who_leads_does_not_come_back_without_its_lead() -> None:
    shares = Shares({}, 10.0)
    shares.entered("a")
    shares.entered("b")
    shares.charge("a", 50.0, 0.0)
    shares.left("a")
    shares.entered("a")
    assert shares.eligible(["a", "b"]) == ["b"]


def test_who_had_more_than_its_share_lately_goes_after_the_others() -> None:
    shares = Shares({"paid": 3.0}, 1e9)
    shares.entered("heavy")
    for tenant, tokens in (("heavy", 700.0), ("paid", 200.0), ("light", 100.0)):
        shares.charge(tenant, tokens, 5.0)
    shares.entered("light")
    assert [name for name in ("heavy", "paid", "light") if shares.over(name)] == ["heavy"]
    assert shares.eligible(["heavy", "light"]) == ["light"]
    assert shares.eligible(["heavy"]) == ["heavy"]
    shares.charge("paid", 1000.0, 5.0)  # 400 by its weight
    assert shares.over("heavy") and not shares.over("paid")
    shares.charge("light", 100.0, 5.0 + 20 * HALF_S)
    assert not shares.over("heavy")


def test_a_tenant_that_is_alone_is_never_over_its_share() -> None:
    shares = Shares({}, 10.0)
    shares.charge("a", 1000.0, 0.0)
    assert not shares.over("a") and not shares.over("b")


def test_a_tenant_floods_the_fleet_by_what_the_others_had() -> None:
    shares = Shares({"paid": 4.0}, 1e9)
    shares.charge("heavy", 80.0, 0.0)
    assert not shares.floods("heavy"), "there is nobody else"
    for tenant in ("a", "b"):
        shares.charge(tenant, 20.0, 0.0)
    assert shares.floods("heavy") and not shares.floods("a") and not shares.floods("c")
    shares.charge("b", 20.0, 0.0)  # 30 on average
    assert not shares.floods("heavy")
    shares.charge("paid", 400.0, 0.0)  # 100 by its weight
    assert not shares.floods("paid")
    shares = Shares({"paid": 5.0}, 1e9)
    shares.charge("paid", 1000.0, 0.0)
    shares.charge("free", 50.0, 0.0)
    assert not shares.floods("paid"), "for it is within its share"


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="'a' is not positive"):
        Shares({"a": 0.0}, 1.0)


reuses = st.builds(Reuse, *[st.integers(0, 4)] * 3)


def within(blocks: int, reuse: Reuse) -> Reuse:
    """As much of it as a prompt has blocks."""
    gpu = min(reuse.gpu, blocks)
    cpu = min(reuse.cpu, blocks - gpu)
    return Reuse(gpu, cpu, min(reuse.disk, blocks - gpu - cpu))


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(("depth_first", "arrival")), quantum=st.sampled_from((20, 200))
    )
    def begin(self, order: Order, quantum: float) -> None:
        self.order, self.quantum = order, quantum
        self.shares = Shares({"x": 2.0}, quantum)
        self.lacking: dict[int, set[BranchQueue]] = {}
        self.queue = BranchQueue(SIZE, self.shares, order, self.lacking)
        self.waiting: dict[int, tuple[Job, Reuse]] = {}
        self.service: dict[str, float] = {}
        self.lately: Counter[str] = Counter()
        self.now, self.ids = 0.0, 0

    def floor(self) -> float:
        tenants = {job.tenant for job, _ in self.waiting.values()}
        return min((self.service[tenant] for tenant in tenants), default=0.0)

    @rule(
        path=st.lists(st.integers(0, 1), max_size=4),
        reuse=reuses,
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from((0, 0, 0, 1)),
        waited=st.sampled_from((0.0, 2.5)),  # no two arrive at once
    )
    def file(
        self, path: list[int], reuse: Reuse, tenant: str, priority: int, waited: float
    ) -> None:
        self.now += 1
        self.ids += 1
        new = job(self.ids, *path, arrived=self.now - waited, tenant=tenant, priority=priority)
        if all(known.tenant != tenant for known, _ in self.waiting.values()):
            self.service[tenant] = max(self.service.get(tenant, self.floor()), self.floor())
        self.waiting[new.id] = new, within(len(path), reuse)
        self.queue.file(*self.waiting[new.id])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), reuse=reuses)
    def match(self, data: st.DataObject, reuse: Reuse) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        known, _ = self.waiting[id]
        self.waiting[id] = known, within(len(known.keys[SIZE]), reuse)
        self.queue.file(*self.waiting[id])

    @precondition(lambda self: self.waiting)
    @rule(bound=st.sampled_from((1.0, 3.0, 100.0)), charge=st.sampled_from((0.0, 10.0, 50.0)))
    def take(self, bound: float, charge: float) -> None:
        head = self.queue.next(self.now - bound)
        assert head is not None
        assert head == self.wanted(self.now - bound)
        oldest = min(job.arrived for job, _ in self.waiting.values())
        if self.order == "depth_first" and oldest >= self.now - bound:
            within = sum(
                job.tokens - reuse.worth * SIZE
                for job, reuse in self.waiting.values()
                if not self.over(job.tenant)
            )
            assert self.queue.before(1 << 30, over=False) == within
            assert self.queue.before(0, over=True) == within
        self._leave(head[0], charge)

    @rule(path=st.lists(st.integers(0, 1), max_size=5), guess=st.integers(0, 6))
    def promise(self, path: list[int], guess: int) -> None:
        """Of a prompt of which the server has any number of blocks."""
        keys = job(0, *path).keys[SIZE]
        for held, key in enumerate(keys):
            depths = [
                sum(one == other for one, other in zip(keys, known.keys[SIZE], strict=False))
                for known, reuse in self.waiting.values()
                if known.keys[SIZE][reuse.gpu : reuse.gpu + 1] == [key]
            ]
            assert bool(depths) == (self.queue in self.lacking.get(key, ()))
            if depths:
                assert self.queue.promised(keys, held, guess) in depths

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._leave(self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))][0], 0.0)

    def _leave(self, gone: Job, charge: float) -> None:
        self.queue.remove(gone)
        del self.waiting[gone.id]
        still = {job.tenant for job, _ in self.waiting.values()}
        if gone.tenant not in still:
            self.service = {
                tenant: served
                for tenant, served in self.service.items()
                if tenant in still or (still and served > self.floor())
            }
        if gone.tenant in self.service:
            self.service[gone.tenant] += charge / (2.0 if gone.tenant == "x" else 1.0)
        if charge:
            self.lately[gone.tenant] += int(charge)
        self.shares.charge(gone.tenant, charge, 0.0)

    def over(self, tenant: str) -> bool:
        weights = {name: 2.0 if name == "x" else 1.0 for name in TENANTS}
        mean = self.lately.total() / (sum(weights[name] for name in self.lately) or 1.0)
        return self.lately[tenant] > OVER * mean * weights[tenant]

    def wanted(self, overdue_since: float) -> tuple[Job, Reuse]:
        oldest = min(self.waiting.values(), key=lambda entry: entry[0].arrived)
        if oldest[0].arrived < overdue_since:
            return oldest
        tenants = {job.tenant for job, _ in self.waiting.values()}
        first = {tenant for tenant in tenants if not self.over(tenant)} or tenants
        ceiling = max(self.floor() + self.quantum, min(self.service[one] for one in first))
        may = {tenant for tenant in first if self.service[tenant] <= ceiling}
        return min((e for e in self.waiting.values() if e[0].tenant in may), key=self.place)

    def place(self, entry: tuple[Job, Reuse]) -> tuple[float, ...]:
        job, reuse = entry
        if self.order == "arrival":
            return job.priority, job.arrived
        return job.priority, (job.tokens - reuse.worth * SIZE) // SIZE, -reuse.gpu, job.arrived

    @invariant()
    def sums_agree(self) -> None:
        uncached = {id: job.tokens - n.worth * SIZE for id, (job, n) in self.waiting.items()}
        needs = list(uncached.values())
        assert len(self.queue) == len(needs)
        assert self.queue.tokens == sum(needs)
        if self.order == "depth_first":
            assert self.queue.around(1 << 30) == (sum(needs), 0)
            assert self.queue.around(0) == (0, len(needs))
            assert self.queue.before(1 << 30, over=True) == sum(needs)
            assert self.queue.before(0, over=False) == 0
        below: dict[int, list[int]] = {}
        for job, reuse in self.waiting.values():
            for key in job.keys[SIZE][reuse.gpu :][:1]:
                below.setdefault(key, []).append(job.id)
        assert self.queue._below.keys() == below.keys()
        for key, ids in below.items():
            assert sorted(job.id for job in self.queue.below(key)) == sorted(ids)

    def teardown(self) -> None:
        for gone, _ in list(self.waiting.values()):
            self.queue.remove(gone)
        assert not self.queue._below and not self.shares._service
        for sizes in (self.queue._within, self.queue._over):
            assert not any(sizes.ahead) and not any(sizes.behind)
        assert self.queue.next(1e9) is None and not self.queue._tenants and not self.queue._oldest


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase
