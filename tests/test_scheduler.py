"""The scheduler under a clock of its own: order, sharing, preemption, limits."""

import random
from array import array
from dataclasses import replace

import pytest
from ledger_runner import LedgerRunner

from replicas.engine import Finish, Namespace, Request, Sampling
from replicas.radix.scheduler import Advance, Limits, NeverRuns, Scheduler
from replicas.radix.sequence import Chunk, Sequence
from replicas.radix.waiting import Policy

SIZE = 4  # tokens in a block
SPACE = Namespace("m")


class Bench:
    """A scheduler, a ledger and a clock that moves a second each step."""

    def __init__(
        self,
        blocks: int = 64,
        chunk: int = 32,
        running: int = 8,
        policy: Policy = "longest_prefix",
        starvation_s: float = 1000.0,
        context: int = 400,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        limits = Limits(SIZE, blocks, context, chunk, running, policy, starvation_s)
        self.scheduler = Scheduler(limits, eos)
        self.runner = LedgerRunner(blocks, SIZE, 1000)
        self.now = 0.0
        self.ids = 0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.chunks: list[Chunk] = []  # of the last step

    def add(self, prompt: list[int], max_tokens: int = 2, priority: int = 0, **more: object) -> int:
        self.ids += 1
        space = more.pop("space", SPACE)
        assert isinstance(space, Namespace)
        sampling = Sampling(max_tokens, **more)  # type: ignore[arg-type]
        request = Request(self.ids, space, array("I", prompt).tobytes(), sampling, priority)
        self.scheduler.add(request, self.now)
        self.tokens[self.ids] = []
        return self.ids

    def press(self) -> int:
        """One that goes last and wants over half the pool: until it runs, not all has room."""
        blocks = self.scheduler.limits.blocks
        return self.add(prompt(SIZE * blocks // 2 + SIZE, seed=99), max_tokens=1, priority=9)

    def step(self) -> list[Advance]:
        self.now += 1
        self.chunks = self.scheduler.plan(self.now)
        sampled = self.runner.run(self.chunks)
        advances = self.scheduler.commit(self.chunks, sampled, self.now)
        for advance in advances:
            id = advance.sequence.request.id
            if advance.sampled:
                self.tokens[id].append(advance.sampled.token)
            if advance.finish:
                assert id not in self.finished
                self.finished[id] = advance.finish
        return advances

    def drain(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("still busy")

    def computing(self) -> list[int]:
        return [chunk.sequence.request.id for chunk in self.chunks]

    def computed(self, id: int) -> int:
        """Tokens computed for a request so far."""
        return sum(
            chunk.end - chunk.start
            for chunk in self.runner.computed
            if chunk.sequence.request.id == id
        )

    def check_quiet(self) -> None:
        """No request, so no block is held: all are free or in the tree, and the tree can go."""
        scheduler = self.scheduler
        load = scheduler.load(0, 0)
        assert (load.running, load.waiting, load.outstanding_tokens, load.used_blocks) == (0,) * 4
        assert scheduler.pool.available + scheduler.tree.size == scheduler.limits.blocks
        assert not any(node.locks for node in scheduler.tree.nodes())
        scheduler.flush(self.now)
        assert scheduler.pool.available == scheduler.limits.blocks


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_a_repeated_prompt_computes_only_what_must_be_sampled_from() -> None:
    bench = Bench()
    first = bench.add(prompt(16), max_tokens=1)
    bench.drain()
    again = bench.add(prompt(16), max_tokens=1)
    bench.drain()
    assert bench.computed(first) == 16
    assert (
        bench.computed(again) == 4
    )  # the last block: one token is needed, only whole blocks match
    assert bench.tokens[first] == bench.tokens[again]


def test_the_next_turn_reuses_the_generated_tokens() -> None:
    bench = Bench()
    first = bench.add(prompt(10), max_tokens=12)
    bench.drain()
    turn = prompt(10) + bench.tokens[first] + prompt(5, seed=1)
    second = bench.add(turn, max_tokens=1)
    bench.drain()
    assert bench.computed(second) == 27 - 20  # 21 tokens had KV: five whole blocks


def test_decodes_run_in_every_step_beside_a_long_prefill() -> None:
    bench = Bench(chunk=8)
    short = bench.add(prompt(4), max_tokens=20)
    bench.step()
    long = bench.add(prompt(60, seed=1))
    for step in range(6):
        bench.step()
        assert bench.computing() == [short, long]
        assert [chunk.end - chunk.start for chunk in bench.chunks] == [1, 7]
        assert len(bench.tokens[short]) == step + 2


def test_a_prefix_that_is_being_computed_is_computed_once() -> None:
    bench = Bench(chunk=8)
    shared = prompt(40)
    ids = [bench.add(shared + prompt(6, seed=i)) for i in range(1, 6)]
    bench.step()
    assert bench.computing() == ids[:1]
    bench.drain()
    assert bench.computed(ids[0]) == 46 + 1
    for id in ids[1:]:
        assert bench.computed(id) == 6 + 1


def test_a_deferred_request_lets_others_pass_and_follows_at_once() -> None:
    bench = Bench(chunk=16)
    leader = bench.add(prompt(40), max_tokens=30)
    follower = bench.add(prompt(40))
    other = bench.add(prompt(4, seed=1))
    bench.step()
    bench.step()
    assert bench.computing() == [leader]
    bench.step()
    assert bench.computing() == [leader, other]
    load = bench.scheduler.load(0, 0)
    assert (load.waiting, load.outstanding_tokens) == (1, 4)  # it will reuse all but a block
    bench.step()
    assert follower in bench.computing()
    assert bench.computed(follower) == 4


def test_a_follower_outlives_a_leader_that_is_cancelled_within_the_step() -> None:
    bench = Bench(chunk=64)
    leader, follower = bench.add(prompt(40)), bench.add(prompt(40))
    chunks = bench.scheduler.plan(1.0)
    assert [chunk.sequence.request.id for chunk in chunks] == [leader]
    assert bench.scheduler.end(leader, 1.0)
    assert bench.scheduler.commit(chunks, [None], 2.0) == []
    bench.drain()
    assert list(bench.finished) == [follower]
    bench.check_quiet()


def test_a_deferred_request_can_be_cancelled() -> None:
    bench = Bench(chunk=64)
    leader, follower = bench.add(prompt(40)), bench.add(prompt(40))
    bench.step()
    assert bench.scheduler.end(follower, bench.now)
    bench.drain()
    assert list(bench.finished) == [leader]
    assert bench.computed(follower) == 0
    bench.check_quiet()


def test_equal_prompts_of_two_namespaces_do_not_wait_for_each_other() -> None:
    bench = Bench(chunk=64)
    ids = [bench.add(prompt(20)), bench.add(prompt(20), space=Namespace("m", salt="other"))]
    bench.step()
    assert bench.computing() == ids


def test_fcfs_is_the_plain_baseline() -> None:
    bench = Bench(policy="fcfs", chunk=64)
    warm = bench.add(prompt(8), max_tokens=1)
    bench.drain()
    ids = [bench.add(prompt(30, seed=1)), bench.add(prompt(30, seed=1)), bench.add(prompt(8))]
    bench.step()
    assert bench.computing() == ids
    assert warm in bench.finished


def test_longest_prefix_goes_first_but_priority_is_stronger() -> None:
    bench = Bench(running=1)
    bench.add(prompt(24), max_tokens=1)
    bench.drain()
    last = bench.press()
    ids = [
        bench.add(prompt(24, seed=1), max_tokens=1),
        bench.add(prompt(8) + prompt(16, seed=2), max_tokens=1),
        bench.add(prompt(24), max_tokens=1),
        bench.add(prompt(24, seed=3), max_tokens=1, priority=-1),
    ]
    bench.drain()
    assert list(bench.finished)[1:] == [ids[3], ids[2], ids[1], ids[0], last]


def test_a_match_that_grows_while_waiting_counts() -> None:
    bench = Bench(running=1, chunk=64)
    last = bench.press()
    bench.add(prompt(24, seed=1), max_tokens=1)
    cold = bench.add(prompt(24, seed=2), max_tokens=1)
    sibling = bench.add(prompt(24, seed=1) + prompt(9, seed=4), max_tokens=1)
    bench.drain()
    assert list(bench.finished)[1:] == [sibling, cold, last]


def test_nobody_starves_under_a_stream_of_hot_requests() -> None:
    bench = Bench(blocks=32, running=2, starvation_s=20.0)
    hot = prompt(32)
    bench.add(hot)
    bench.drain()
    cold = bench.add(prompt(32, seed=1))
    start = bench.now
    while cold not in bench.finished:
        bench.add([*hot, len(bench.tokens)])
        bench.add([*hot, len(bench.tokens)])
        bench.step()
        assert bench.now - start <= 20 + 6  # the bound, and the two that ran already
    assert bench.now - start > 20  # it did have to wait


def test_an_overdue_request_is_deferred_no_longer() -> None:
    bench = Bench(chunk=2, starvation_s=3.0)
    leader = bench.add(prompt(80))
    twin = bench.add(prompt(80))
    for _ in range(10):
        bench.step()
    assert bench.computing() == [leader]
    # The leader's budget leaves no room, so widen the step: deferral alone must not hold it now.
    bench.scheduler.limits = replace(bench.scheduler.limits, chunk_tokens=70)
    bench.step()
    assert bench.computing() == [leader, twin]
    bench.drain()
    assert bench.tokens[leader] == bench.tokens[twin]
    bench.check_quiet()


def test_the_latest_arrival_is_preempted_and_resumes_with_the_same_output() -> None:
    alone = {}
    for seed in range(3):
        bench = Bench()
        id = bench.add(prompt(13, seed), max_tokens=25)
        bench.drain()
        alone[seed] = bench.tokens[id]
    bench = Bench(blocks=17)
    ids = [bench.add(prompt(13, seed), max_tokens=25) for seed in range(3)]
    preempted: list[int] = []
    sequences: dict[int, Sequence] = {}
    while not bench.scheduler.idle:
        bench.step()
        for chunk in bench.chunks:
            sequences[chunk.sequence.request.id] = chunk.sequence
        preempted += [
            id
            for id, sequence in sequences.items()
            if sequence.generated and not sequence.blocks and id not in bench.finished
        ]
    assert preempted
    assert preempted[0] == ids[2]
    assert ids[0] not in preempted
    assert [bench.tokens[id] for id in ids] == list(alone.values())
    bench.check_quiet()


def test_what_arrived_first_is_kept_even_if_it_was_admitted_last() -> None:
    bench = Bench(blocks=10, chunk=64, running=2)
    early = bench.add(prompt(13), max_tokens=20)
    late = bench.add(prompt(13, seed=1), max_tokens=20, priority=-1)
    bench.step()
    assert bench.computing() == [late, early]
    while {early, late} == set(bench.computing()):
        bench.step()
    assert bench.computing() == [early]
    first = bench.add(prompt(4, seed=2), priority=-9)
    bench.scheduler.end(early, bench.now)
    bench.step()
    assert bench.computing() == [late, first]  # a preempted one is at the front


def test_admission_leaves_every_running_sequence_a_block_to_grow_into() -> None:
    bench = Bench(blocks=8)
    first = bench.add(prompt(16), max_tokens=4)
    second = bench.add(prompt(16, seed=1))
    bench.step()
    while first not in bench.finished:
        assert second not in bench.computing()
        bench.step()
    bench.step()
    assert bench.computing() == [second]


def test_prefill_moves_however_many_sequences_decode() -> None:
    bench = Bench(chunk=2)
    ids = [bench.add(prompt(1, seed), max_tokens=40) for seed in range(4)]
    for _ in range(6):
        bench.step()
    assert set(bench.computing()) == set(ids)


def test_a_sequence_that_fills_the_pool_alone_ends_with_length() -> None:
    bench = Bench(blocks=6)
    id = bench.add(prompt(10), max_tokens=100)
    bench.drain()
    assert bench.finished[id] == Finish.LENGTH
    assert len(bench.tokens[id]) == 6 * SIZE - 10 + 1
    bench.check_quiet()


def test_a_prompt_that_pins_leave_no_room_for_ends_and_blocks_nobody() -> None:
    bench = Bench(blocks=8)
    bench.add(prompt(8), max_tokens=1)
    bench.drain()
    tree = bench.scheduler.tree
    assert tree.pin(SPACE, array("I", prompt(8)).tobytes(), 1e6, bench.now) == 2
    large = bench.add(prompt(30, seed=1))
    small = bench.add(prompt(9, seed=2))
    bench.drain()
    assert bench.finished == {1: Finish.LENGTH, large: Finish.ERROR, small: Finish.LENGTH}


def test_stop_rules() -> None:
    bench = Bench()
    plain = bench.add(prompt(9), max_tokens=6)
    bench.drain()
    out = bench.tokens[plain]
    eos = frozenset({out[2]})
    for more, finish, length in (
        ({}, Finish.STOP, 3),
        ({"ignore_eos": True}, Finish.LENGTH, 6),
        ({"stop_token_ids": frozenset({out[1]})}, Finish.STOP, 2),
        ({"ignore_eos": True, "stop_token_ids": eos}, Finish.STOP, 3),
    ):
        bench = Bench(eos=eos)
        id = bench.add(prompt(9), 6, **more)
        bench.drain()
        assert (bench.finished[id], bench.tokens[id]) == (finish, out[:length])


def test_max_tokens_is_clipped_to_the_context() -> None:
    bench = Bench(context=20)
    id = bench.add(prompt(15), max_tokens=50)
    bench.drain()
    assert bench.finished[id] == Finish.LENGTH
    assert len(bench.tokens[id]) == 5


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [(0, 1, "token ids"), (20, 1, "context"), (17, 1, "KV pool"), (4, 0, "max_tokens")],
)
def test_what_can_never_run_says_why(length: int, max_tokens: int, message: str) -> None:
    bench = Bench(context=20, blocks=4)
    with pytest.raises(NeverRuns, match=message):
        bench.add(prompt(length), max_tokens)
    assert bench.scheduler.idle


@pytest.mark.parametrize("seed", range(6))
def test_random_load_gives_the_output_of_no_reuse_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.choice([14, 20, 60]),
        chunk=rng.choice([3, 8, 40]),
        running=rng.choice([2, 6]),
        policy=rng.choice(["fcfs", "longest_prefix"]),
        starvation_s=rng.choice([5.0, 1000.0]),
    )
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    for _ in range(120):
        if rng.random() < 0.6:
            cut = rng.randrange(1, 30)
            tokens = prompt(cut, rng.randrange(3)) + prompt(rng.randrange(8), rng.randrange(50))
            most = rng.randrange(1, 12)
            asked[bench.add(tokens, most, priority=rng.randrange(2))] = (tokens, most)
        if asked and rng.random() < 0.1:
            id = rng.choice(list(asked))
            if bench.scheduler.end(id, bench.now):
                cancelled.add(id)
        bench.step()
    bench.drain()
    bench.check_quiet()
    assert asked.keys() == bench.finished.keys() | cancelled
    assert not bench.finished.keys() & cancelled
    lonely = Bench(blocks=bench.scheduler.limits.blocks, running=1)
    for id, (tokens, most) in asked.items():
        alone = lonely.add(tokens, most, space=Namespace("m", salt=str(id)))
        lonely.drain()
        assert bench.tokens[id] == lonely.tokens[alone][: len(bench.tokens[id])]
        assert id in cancelled or len(bench.tokens[id]) == len(lonely.tokens[alone])


def test_a_step_matches_few_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(running=1)
    for seed in range(2000):
        bench.add(prompt(8, seed))
    matches = 0
    resident = bench.scheduler.tree.resident

    def counting(namespace: Namespace, tokens: bytes, limit: int) -> int:
        nonlocal matches
        matches += 1
        return resident(namespace, tokens, limit)

    monkeypatch.setattr(bench.scheduler.tree, "resident", counting)
    for _ in range(50):
        bench.step()
    assert 0 < matches <= 50 * 20


def test_matches_that_come_and_go_leave_nothing_behind() -> None:
    bench = Bench(running=1, blocks=128, context=1000)
    bench.add(prompt(8, seed=1), max_tokens=300)
    bench.step()
    for seed in range(20):
        bench.add(prompt(8) + prompt(8, seed))
    scheduler, tree = bench.scheduler, bench.scheduler.tree
    for _ in range(100):
        node = tree.acquire(SPACE, b"", 0, bench.now).node
        first = array("I", prompt(4)).tobytes()
        node = tree.extend(node, first, scheduler.pool.alloc(1), bench.now).node
        tree.release(node, bench.now)
        bench.step()
        scheduler.flush(bench.now)
        bench.step()
    assert len(scheduler._waiting) == 20
    assert len(scheduler._waiting._heap) < 200


def test_a_stream_of_short_requests_leaves_nothing_behind() -> None:
    bench = Bench(running=64, chunk=512)
    for _ in range(50):
        for seed in range(64):
            bench.add(prompt(5, seed), max_tokens=1)
        bench.step()
    bench.drain()
    waiting = bench.scheduler._waiting
    assert not waiting._works
    assert not waiting._rota
    assert len(waiting._heap) < 200
