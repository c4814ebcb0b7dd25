"""The radix engine as its service sees it: a thread, a callback, and the promises of Engine."""

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import pytest
from ledger_runner import LedgerRunner

from hotbranch.keys import block_keys, root
from hotbranch.settings import ReplicaSettings
from replicas.engine import Finish, Namespace, Output, Request, Sampling, Step, StoredRun
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.radix.sequence import Chunk, Sampled

SIZE = 4
WAIT_S = 60.0
SPACE = Namespace("m")


class Spelled:
    """Text in which every token is its number and a space; a word is held back until the next."""

    def __init__(self, request: Request) -> None:
        self.stop = request.sampling.stop
        self.held = ""

    def push(self, token: int) -> tuple[str, str | None]:
        out, self.held = self.held, f"{token} "
        return out, str(token) if str(token) in self.stop else None

    def flush(self) -> str:
        out, self.held = self.held, ""
        return out


class GatedRunner(LedgerRunner):
    """A ledger whose steps wait at a gate while it is closed, and fail on request."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, SIZE, 1000)
        self.failures = 0
        self._gate = threading.Condition()
        self._allowed = inf  # steps that may still pass
        self._waiting = False

    def close(self, after: int = 0) -> None:
        """Close the gate once so many more steps have passed."""
        with self._gate:
            self._allowed = after

    def held(self) -> None:
        """Wait until a step is at the closed gate."""
        with self._gate:
            assert self._gate.wait_for(lambda: self._waiting, WAIT_S)

    def open(self) -> None:
        with self._gate:
            self._allowed = inf
            self._gate.notify_all()

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        with self._gate:
            self._waiting = True
            self._gate.notify_all()
            assert self._gate.wait_for(lambda: self._allowed > 0, WAIT_S)
            self._waiting = False
            self._allowed -= 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        return super().run(chunks)


@dataclass
class Client:
    """An engine and all that came out of it."""

    engine: RadixEngine
    runner: GatedRunner
    steps: list[Step] = field(default_factory=list)
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def emit(self, step: Step) -> None:
        with self.changed:
            self.steps.append(step)
            for output in step.outputs:
                self.outputs.setdefault(output.id, []).append(output)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)

    def submit(
        self, id: int, prompt: list[int], most: int = 4, space: Namespace = SPACE, **more: object
    ) -> None:
        sampling = Sampling(most, **more)  # type: ignore[arg-type]
        self.engine.submit(Request(id, space, array("I", prompt).tobytes(), sampling))

    def done(self, *ids: int) -> list[Output]:
        """Wait until these have finished; the last output of each."""
        self.wait(lambda: all(id in self.outputs and self.outputs[id][-1].finish for id in ids))
        return [self.outputs[id][-1] for id in ids]

    def tokens(self, id: int) -> list[int]:
        return [token for output in self.outputs[id] for token in output.tokens]

    def text(self, id: int) -> str:
        return "".join(output.text for output in self.outputs[id])

    def snapshot(self) -> tuple[int, set[int]]:
        """The keys that are cached, and how many steps were emitted by then."""
        found: list[tuple[int, set[int]]] = []

        def reply(runs: "list[StoredRun]") -> None:
            with self.changed:
                found.append((len(self.steps), {key for run in runs for key in run.keys}))
                self.changed.notify_all()

        self.engine.snapshot(reply)  # type: ignore[arg-type]
        self.wait(lambda: bool(found))
        return found[0]


@contextmanager
def started(
    blocks: int = 64,
    chunk: int = 32,
    running: int = 8,
    eos: frozenset[int] = frozenset(),
) -> Iterator[Client]:
    runner = GatedRunner(blocks)
    limits = Limits(SIZE, blocks, 400, chunk, running, "longest_prefix", 1000.0)
    client = Client(RadixEngine(limits, runner, eos, Spelled, vocab_size=1000), runner)
    client.engine.start(client.emit)
    try:
        yield client
    finally:
        runner.open()
        client.engine.stop()
    assert not runner.known, "the runner still remembers ended sequences"


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_cached_tokens_come_once_with_the_first_output() -> None:
    with started() as client:
        client.submit(1, prompt(16))
        client.done(1)
        client.submit(2, prompt(16))
        client.done(2)
        cached = {id: [output.cached_tokens for output in client.outputs[id]] for id in (1, 2)}
        assert cached == {1: [0, None, None, None], 2: [12, None, None, None]}
        assert client.tokens(1) == client.tokens(2)
        assert [step.number for step in client.steps] == list(range(1, len(client.steps) + 1))


def test_text_follows_the_finish() -> None:
    with started() as client:
        client.submit(1, prompt(9), most=5)
        (end,) = client.done(1)
        out = client.tokens(1)
        assert end.finish == Finish.LENGTH
        assert client.text(1) == "".join(f"{token} " for token in out)
        client.submit(2, prompt(9), most=5, stop=(str(out[2]),))
        (end,) = client.done(2)
        assert (end.finish, end.stop_reason) == (Finish.STOP, str(out[2]))
        assert client.tokens(2) == out[:3]
        assert client.text(2) == f"{out[0]} {out[1]} "
        client.submit(3, prompt(9), most=5, stop_token_ids=frozenset({out[2]}))
        (end,) = client.done(3)
        assert (end.finish, end.stop_reason, client.tokens(3)) == (Finish.STOP, "", out[:3])
        assert client.text(3) == f"{out[0]} {out[1]} "  # the stop token has no text
        client.submit(4, prompt(9), most=5, stop_token_ids=frozenset({out[2]}), include_stop=True)
        (end,) = client.done(4)
        assert (end.finish, client.tokens(4)) == (Finish.STOP, out[:3])
        assert client.text(4) == f"{out[0]} {out[1]} {out[2]} "


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    with started() as client:
        client.submit(1, prompt(9), most=2)
        client.done(1)
        client.submit(2, prompt(9), most=2, stop=(str(client.tokens(1)[1]),))
        assert client.done(2)[0].finish == Finish.STOP


@pytest.mark.parametrize("length", [0, 400, 300])
def test_what_can_never_run_ends_at_once_with_an_error(length: int) -> None:
    with started() as client:
        client.submit(1, prompt(length))
        (end,) = client.done(1)
        assert (end.finish, end.tokens) == (Finish.ERROR, [])
        assert end.error
        client.submit(2, [1000])
        assert "vocabulary" in client.done(2)[0].error
        assert not client.runner.computed


def test_a_cancel_takes_effect_within_one_step_in_every_state() -> None:
    with started(running=1, chunk=4) as client:
        client.runner.close(after=4)  # two of prefill, two of decode
        client.submit(1, prompt(8), most=300)
        client.runner.held()
        before = len(client.steps)
        client.submit(2, prompt(8, seed=1))
        client.engine.cancel(2)  # waiting
        client.engine.cancel(1)  # decoding
        client.engine.cancel(77)  # unknown
        client.runner.open()
        assert [end.finish for end in client.done(1, 2)] == [Finish.CANCELLED] * 2
        ends = [at for at, step in enumerate(client.steps) if any(o.finish for o in step.outputs)]
        assert max(ends) <= before + 1
        client.engine.cancel(1)  # finished
        client.runner.close()
        client.submit(3, prompt(200, seed=2))
        client.runner.held()
        client.engine.cancel(3)  # prefilling
        client.runner.open()
        assert client.done(3)[0].finish == Finish.CANCELLED
        assert not any(chunk.end == 200 for chunk in client.runner.computed)
        assert len(client.outputs) == 3


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    with started() as client:
        client.runner.failures = 1
        client.submit(1, prompt(8))
        (end,) = client.done(1)
        assert (end.finish, end.error) == (Finish.ERROR, "the model runner failed")
        assert client.engine.healthy() == ""
        client.runner.failures = 3
        for id in (2, 3, 4):
            client.submit(id, prompt(8))
            client.done(id)
        assert "out of memory" in client.engine.healthy()
        client.submit(5, prompt(8))
        assert client.done(5)[0].finish == Finish.LENGTH
        assert client.engine.healthy() == ""
        assert client.outputs[5][0].cached_tokens == 0  # nothing that failed was cached


def test_a_bug_ends_every_request_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with started() as client:
        client.runner.close()
        client.submit(1, prompt(8))
        client.runner.held()
        monkeypatch.setattr(client.runner, "run", lambda chunks: [])
        monkeypatch.setattr(client.engine._scheduler, "commit", None)
        client.submit(2, prompt(8))
        client.runner.open()
        assert [end.finish for end in client.done(1)] == [Finish.ERROR]
        assert "broke" in client.engine.healthy()
        assert client.done(2)[0].finish == Finish.ERROR
        client.submit(3, prompt(8))
        assert client.done(3)[0].finish == Finish.ERROR
        assert [len(client.outputs[id]) for id in (1, 2, 3)] == [1, 1, 1]
        client.runner.known.clear()


def test_a_bug_while_ending_a_request_ends_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with started() as client:
        client.runner.close()
        client.submit(1, prompt(8), most=300)
        client.runner.held()
        monkeypatch.setattr(client.engine._scheduler, "end", None)
        client.engine.cancel(1)
        client.runner.open()
        client.done(1)
        client.submit(2, prompt(8))
        client.done(2)
        assert [bool(output.finish) for output in client.outputs[1]].count(True) == 1
        client.runner.known.clear()


def test_a_bug_in_one_command_loses_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with started() as client:
        client.runner.close()
        client.submit(1, prompt(8))
        client.runner.held()
        monkeypatch.setattr(client.engine._scheduler, "flush", None)
        flushed = client.engine.flush()
        client.submit(2, prompt(8))
        unpinned = client.engine.unpin(SPACE, b"")
        client.runner.open()
        assert isinstance(flushed.exception(WAIT_S), TypeError)
        assert [end.finish for end in client.done(1, 2)] == [Finish.ERROR] * 2
        assert unpinned.result(WAIT_S) == 0
        client.runner.known.clear()


def test_stop_cancels_what_is_unfinished() -> None:
    with started(running=1) as client:
        client.runner.close(after=3)
        client.submit(1, prompt(8), most=300)
        client.submit(2, prompt(8))
        client.runner.held()
        stopping = threading.Thread(target=client.engine.stop)
        stopping.start()
        while not client.engine.flush().cancelled():  # nothing is accepted once it stops
            time.sleep(0.001)
        client.runner.open()
        stopping.join()
        assert [end.finish for end in client.done(1, 2)] == [Finish.CANCELLED] * 2
        assert len(client.tokens(1)) == 4


def test_pin_unpin_and_flush() -> None:
    tokens = array("I", prompt(16)).tobytes()
    with started(blocks=32) as client:
        engine = client.engine
        assert engine.pin(SPACE, tokens, 60.0).result(WAIT_S) == 0
        client.submit(1, prompt(16), most=1)
        client.submit(2, prompt(60, seed=1), most=1)
        client.done(1, 2)
        assert engine.pin(SPACE, tokens, 60.0).result(WAIT_S) == 4
        large = array("I", prompt(60, seed=1)).tobytes()
        assert engine.pin(SPACE, large, 60.0).result(WAIT_S) is None
        client.submit(3, prompt(100, seed=2), most=1)
        client.done(3)
        pinned = set(block_keys(tokens, SIZE, root("m")))
        assert pinned <= client.snapshot()[1]
        assert engine.unpin(SPACE, tokens).result(WAIT_S) == 4
        assert engine.unpin(SPACE, tokens).result(WAIT_S) == 0
        engine.pin(SPACE, tokens, 60.0).result(WAIT_S)
        engine.flush().result(WAIT_S)
        assert pinned <= set(client.steps[-1].evicted[0].keys)  # emitted before the future was done
        assert client.snapshot()[1] == set()
        load = engine.load()
        assert (load.used_blocks, load.cached_blocks) == (0, 0)


def test_changes_since_a_snapshot_make_the_next_snapshot() -> None:
    rng = random.Random(3)
    with started(blocks=24, chunk=16, running=4) as client:
        view: set[int] = set()
        read = 0
        for round in range(12):
            for id in range(round * 6, round * 6 + 6):
                cut = rng.randrange(4, 40)
                client.submit(id, prompt(cut, rng.randrange(3)), most=rng.randrange(1, 20))
            if round % 4 == 3:
                client.engine.flush()
            for upto, truth in (client.snapshot(), client.snapshot()):
                for step in client.steps[read:upto]:
                    for run in step.stored:
                        assert run.parent is None or run.parent in view
                        assert not view & set(run.keys)
                        view.update(run.keys)
                    for key in (key for gone in step.evicted for key in gone.keys):
                        view.remove(key)
                read = upto
                assert view == truth
        client.done(*range(72))
        assert any(step.evicted for step in client.steps)


@pytest.mark.parametrize("seed", range(3))
def test_reuse_does_not_change_the_output(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [
        prompt(rng.randrange(1, 40), rng.randrange(3)) + prompt(rng.randrange(6), rng.randrange(99))
        for _ in range(40)
    ]
    outputs = []
    for reuse in (True, False):
        with started(blocks=20, chunk=16, running=6) as client:
            for id, tokens in enumerate(jobs):
                space = SPACE if reuse else Namespace("m", salt=str(id))
                client.submit(id, tokens, most=1 + id % 15, space=space)
            client.done(*range(len(jobs)))
            outputs.append([client.tokens(id) for id in range(len(jobs))])
            firsts = [client.outputs[id][0].cached_tokens for id in range(len(jobs))]
            assert any(firsts) == reuse
            client.engine.flush().result(WAIT_S)
            assert client.engine.load().used_blocks == 0
            assert client.engine.load().cached_blocks == 0
    assert outputs[0] == outputs[1]


def test_requests_and_cancels_from_many_threads_each_end_once() -> None:
    with started(blocks=24, chunk=16, running=5) as client:

        def use(worker: int) -> None:
            rng = random.Random(worker)
            for id in range(worker * 100, worker * 100 + 30):
                client.submit(id, prompt(rng.randrange(1, 50), rng.randrange(4)), most=8)
                if rng.random() < 0.4:
                    client.engine.cancel(rng.randrange(worker * 100, id + 1))

        threads = [threading.Thread(target=use, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = [worker * 100 + n for worker in range(4) for n in range(30)]
        client.done(*ids)
        client.engine.flush().result(WAIT_S)
        for id in ids:
            assert [bool(output.finish) for output in client.outputs[id]].count(True) == 1
        finishes = {client.outputs[id][-1].finish for id in ids}
        assert finishes == {Finish.LENGTH, Finish.CANCELLED}
        assert client.engine.load().cached_blocks == client.engine.load().used_blocks == 0


def test_limits_follow_the_settings() -> None:
    values = {"kv_tokens": 100, "block_size": 16, "policy": "fcfs"}
    settings = ReplicaSettings.model_validate(values)
    limits = Limits.of(settings, 77)
    assert (limits.blocks, limits.max_context, limits.policy) == (6, 77, "fcfs")
