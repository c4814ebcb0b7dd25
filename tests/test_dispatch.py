"""Prompts that wait at a router, over real replicas and real connections."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from gated_replica import MODEL, PATIENCE_S
from test_fleet import Setup, eventually, finishes, prompt, setup
from told_replica import told_fleet

from hotbranch.settings import RoutingPolicy
from hotbranch.v1.serve_pb2 import FINISH_REASON_LENGTH, Sampling
from router.fleet.holder import Holder
from router.fleet.link import State
from router.generation import Prompt, Unavailable
from router.schedule.dispatch import QueueingDispatcher
from router.schedule.policies import POLICIES
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.policies.load import RoundRobin
from router.schedule.route import LiveRoute
from router.schedule.scheduler import Dispatch, FleetScheduler, Policy, Rules

NARROW = Rules(window=0.1)  # of 512 tokens: two prompts of 44 are over it


class Queue:
    """A dispatcher of its own rules, and the order in which its prompts were sent."""

    def __init__(
        self,
        fleet: Setup,
        rules: Rules = NARROW,
        policy: Callable[[], Policy] = Hotbranch,
        **weights: float,
    ) -> None:
        self.fleet = fleet
        self.dispatcher = QueueingDispatcher(fleet.fleet, fleet.index, rules, weights, policy)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[LiveRoute]] = []

    async def ask(self, *prompts: Prompt) -> None:
        """Hand them in, and let each get as far as it comes."""
        self.tasks += [asyncio.create_task(self._open(one)) for one in prompts]
        await asyncio.sleep(0.05)

    async def _open(self, asked: Prompt) -> LiveRoute:
        route = await self.dispatcher.open(asked, [Sampling(max_tokens=3)])
        self.order.append(asked.request_id)
        return route

    async def finish(self) -> None:
        """Open the gates; all that was asked runs to its end, and nothing is left."""
        for replica in self.fleet.replicas:
            replica.runner.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            for task in self.tasks:
                assert await finishes(await task) == [FINISH_REASON_LENGTH]
        await self.nothing_left()

    async def nothing_left(self) -> None:
        """Field report 25: loads return to 0."""
        assert self.dispatcher.waiting == 0 and self.dispatcher.open_routes == 0
        assert not self.dispatcher._waiting
        scheduler = self.dispatcher._schedulers[MODEL]
        assert not scheduler.waiting and not scheduler._reasons
        for server in scheduler.servers.values():
            assert not server.sent and not len(server.queue)
        await eventually(lambda: not any(s.outstanding.tokens for s in scheduler.servers.values()))


def named(seed: int, name: str, **fields: Any) -> Prompt:
    return prompt(seed, tail=ord(name[-1]), request_id=name, **fields)


async def test_what_hangs_below_the_hot_branch_goes_before_what_came_first() -> None:
    async with setup(1) as fleet:
        await fleet.generate(prompt(1))
        queue = Queue(fleet)
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(named(5, "first"), named(6, "second"))
        await queue.ask(named(7, "cold"), named(8, "colder"))
        assert (queue.dispatcher.open_routes, queue.dispatcher.waiting) == (2, 2)
        await queue.ask(named(1, "hot"))  # 4 tokens to compute: it passes all others
        assert (queue.dispatcher.open_routes, queue.dispatcher.waiting) == (3, 2)
        await queue.finish()
        assert queue.order.index("hot") < queue.order.index("cold")
        assert queue.order[-2:] == ["cold", "colder"]


async def test_an_idle_replica_takes_what_waits_for_another() -> None:
    async with setup(2) as fleet:
        queue = Queue(fleet)
        stuck, free = fleet.replicas
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(12)))
        scheduler = queue.dispatcher._schedulers[MODEL]
        waiting = len(scheduler.servers[Holder(stuck.address)].queue)
        assert waiting
        free.runner.gate.set()
        await eventually(lambda: queue.dispatcher.waiting == 0)
        assert queue.dispatcher.stolen >= waiting
        await queue.finish()


async def test_more_than_may_wait_is_refused_with_a_time_to_come_back() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet, Rules(window=0.1, most_waiting=1))
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(3)))
        assert queue.dispatcher.waiting == 1
        with pytest.raises(Unavailable) as refused:
            await queue.dispatcher.open(named(9, "9"), [Sampling(max_tokens=3)])
        assert refused.value.overloaded and refused.value.retry_after_s >= 1
        await queue.finish()


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet)
        runner = fleet.replicas[0].runner
        runner.gate.clear()
        await queue.ask(named(5, "5"), named(6, "6"))
        with pytest.raises(Unavailable, match=r"within 0\.2 s") as late:
            await queue.dispatcher.open(named(7, "7", deadline_s=0.2), [Sampling(max_tokens=3)])
        assert late.value.overloaded and queue.dispatcher.waiting == 0
        await queue.finish()
        assert len(runner.computed) == 2 * 3  # it never came to the replica


async def test_who_leaves_the_queue_is_forgotten_and_holds_nobody_up() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet)
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(5)))
        assert queue.dispatcher.waiting == 3
        gone = queue.tasks.pop(3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert gone.cancelled() and queue.dispatcher.waiting == 2
        await queue.finish()
        assert sorted(queue.order) == ["0", "1", "2", "4"]


async def test_who_leaves_in_the_moment_it_is_sent_is_cancelled_there() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet)
        fleet.replicas[0].runner.gate.clear()
        tasks = [
            asyncio.create_task(queue.dispatcher.open(named(seed, "x"), [Sampling(max_tokens=900)]))
            for seed in range(6)
        ]
        await asyncio.sleep(0.05)
        for task in tasks[:2]:  # their end moves others, which leave in the same tick
            task.cancel()
        for task in tasks[2:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        fleet.replicas[0].runner.gate.set()
        await queue.nothing_left()


async def test_what_waits_for_a_replica_that_dies_goes_to_another() -> None:
    async with setup(2) as fleet:
        queue = Queue(fleet)
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(8)))
        assert queue.dispatcher.waiting
        dead = fleet.replicas.pop()
        dead.runner.gate.set()
        await dead.server.stop(0)
        await eventually(lambda: len(fleet.fleet.ready(MODEL)) == 1)
        await queue.finish()
        assert len(queue.order) == 8


async def test_a_connection_that_breaks_without_a_word_moves_what_waits() -> None:
    """Also what was sent, for it had no token yet; and nothing is sent to where nobody listens."""
    async with setup(2) as fleet:
        queue = Queue(fleet)
        dead, alive = fleet.replicas
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(8)))
        await dead.server._server.stop(None)  # no drain, no health report
        await eventually(lambda: fleet.link(dead).state is State.CONNECTING)
        assert fleet.link(dead).in_flight == 0
        await queue.finish()
        assert len(queue.order) == 8
        assert {(await task).replica_id for task in queue.tasks} == {alive.address}


async def test_without_any_replica_left_what_waits_is_told() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet)
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(5)))
        fleet.discovery.set()
        async with asyncio.timeout(PATIENCE_S):
            done = await asyncio.gather(*queue.tasks[2:], return_exceptions=True)
        assert all(isinstance(one, Unavailable) and not one.overloaded for one in done)
        queue.tasks = queue.tasks[:2]  # these may finish
        await queue.finish()


async def test_a_tenant_that_asks_for_much_leaves_others_their_share() -> None:
    async with setup(1) as fleet:
        rules = Rules(window=0.1, quantum=100)
        queue = Queue(fleet, rules)
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(*(named(seed, f"heavy {seed}", tenant="heavy") for seed in range(12)))
        await queue.ask(*(named(50 + n, f"light {n}", tenant="light") for n in range(3)))
        await queue.finish()
        last = max(queue.order.index(f"light {n}") for n in range(3))
        assert last < 10


async def test_a_replica_is_told_who_goes_first_and_what_came_of_a_prompt_is_charged() -> None:
    async with told_fleet(1) as (fleet, (told,)):

        async def ask(name: str, priority: int = 0) -> None:
            asked = named(len(told.submits), name, tenant=name, priority=priority)
            assert await finishes(await queue.dispatcher.open(asked, [Sampling()]))

        queue = Queue(fleet)
        for name in ("light", "heavy", "heavy", "heavy", "heavy"):
            await ask(name)
        charged = queue.dispatcher._schedulers[MODEL]._shares._lately
        await eventually(lambda: charged == {"light": 44 + 2, "heavy": 4 * (44 + 2)})
        await ask("heavy")  # it had three times its share
        await ask("heavy", priority=3)
        await ask("light")
        await ask("light", priority=-(1 << 40))
        await ask("light", priority=1 << 40)
        most = (1 << 31) - 1
        assert [sent.priority for sent in told.submits[5:]] == [1, 7, 0, -most, most]


async def test_a_prompt_whose_client_leaves_as_it_is_sent_does_not_run_there() -> None:
    """Its turn has come, and its task has not run since."""
    leaving: list[asyncio.Task[LiveRoute]] = []

    class Leaving(QueueingDispatcher):
        def _perform(self, scheduler: FleetScheduler, dispatches: Sequence[Dispatch]) -> None:
            super()._perform(scheduler, dispatches)
            for dispatch in dispatches:
                if dispatch.job.priority == 7:
                    leaving[0].cancel()

    async with setup(1) as fleet:
        queue = Queue(fleet)
        queue.dispatcher = Leaving(fleet.fleet, fleet.index, NARROW)
        fleet.replicas[0].runner.gate.clear()
        await queue.ask(named(1, "1"), named(2, "2"), named(3, "3", priority=7))
        assert queue.dispatcher.waiting == 1
        leaving.append(queue.tasks.pop())
        await queue.finish()
        assert leaving[0].cancelled()
        await eventually(lambda: fleet.link(fleet.replicas[0]).in_flight == 0)


async def test_a_first_token_makes_room_without_waiting_for_a_report() -> None:
    async with setup(1) as fleet:
        queue = Queue(fleet)
        runner = fleet.replicas[0].runner
        fleet.fleet.changed = lambda link: None  # no report moves anything from here on
        runner.pace_s = 0.02  # so that nothing ends before all have begun
        runner.gate.clear()
        routes = [
            asyncio.create_task(queue.dispatcher.open(named(seed, "x"), [Sampling(max_tokens=900)]))
            for seed in range(5)
        ]
        await eventually(lambda: queue.dispatcher.waiting == 3)
        assert queue.dispatcher.open_routes == 2
        runner.gate.set()
        begun = [await task for task in routes]
        assert queue.dispatcher.open_routes == 5, "none has ended"
        for route in begun:
            route.cancel()
        await queue.nothing_left()


async def test_what_waited_for_a_lost_replica_is_sent_at_once_where_there_is_room() -> None:
    async with setup(2) as fleet:
        hot = prompt(1, tokens=400)
        home = fleet.of(await fleet.generate(hot))
        await fleet.settled()
        queue = Queue(fleet, Rules(window=0.001, steals=False))
        home.runner.gate.clear()
        await queue.ask(*(named(1, f"{n}", tokens=400) for n in range(4)))
        assert (queue.dispatcher.open_routes, queue.dispatcher.waiting) == (1, 3)
        await home.server._server.stop(None)
        await queue.finish()
        assert len(queue.order) == 4


async def test_a_replica_that_discovery_drops_gets_nothing_more_from_that_moment() -> None:
    async with setup(2) as fleet:
        queue = Queue(fleet)
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        await queue.ask(*(named(seed, f"{seed}") for seed in range(8)))
        gone, stays = fleet.replicas
        link = fleet.link(gone)
        assert link.in_flight, "or it would close at once"
        changed, servers = fleet.fleet.changed, queue.dispatcher._schedulers[MODEL].servers
        fleet.fleet.changed = lambda other: None if other.load else changed(other)
        link.load = None  # what changes with a report is not looked at
        fleet.discovery.set(stays.address)
        await eventually(lambda: len(fleet.fleet.links) == 1)
        assert set(servers) == {Holder(stays.address)}
        fleet.fleet.changed = changed
        await queue.finish()


def test_the_settings_know_every_policy() -> None:
    assert get_args(RoutingPolicy) == tuple(POLICIES)


async def test_another_policy_chooses_and_holds_nothing() -> None:
    made: list[RoundRobin] = []

    def make() -> RoundRobin:
        made.append(RoundRobin())
        return made[-1]

    async with setup(2) as fleet:
        queue = Queue(fleet, policy=make)
        for replica in fleet.replicas:
            replica.runner.gate.clear()
        await queue.ask(*(named(1, f"{n}") for n in range(6)))  # ours would keep them together
        assert (queue.dispatcher.open_routes, queue.dispatcher.waiting) == (6, 0)
        await queue.finish()
        assert queue.dispatcher.placements == {"turn": 6}
        went = [(await task).replica_id for task in queue.tasks]
        assert went[0] != went[1]
        assert went == went[:2] * 3
        assert len(made) == 1
