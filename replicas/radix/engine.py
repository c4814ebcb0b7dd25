"""The radix engine: a thread that steps the scheduler and a runner, and tells what changed."""

import logging
import threading
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from replicas.engine import (
    EvictedRun,
    Facts,
    Finish,
    Load,
    Namespace,
    Output,
    Request,
    Step,
    StoredRun,
)
from replicas.radix.scheduler import Advance, Limits, NeverRuns, Scheduler
from replicas.radix.sequence import Chunk, Sampled, Sequence, prefill_tokens
from replicas.step_cost import StepCost

T = TypeVar("T")

FAILURES = 3  # failed steps in a row that make the engine unhealthy

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes chunks on a device."""

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        """One forward pass; a token for each chunk that reaches the end of its sequence."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""


class Text(Protocol):
    """Turns the tokens of one sequence into text, and finds its stop strings."""

    def push(self, token: int) -> tuple[str, str | None]:
        """Text that may be sent, and the stop string that matched."""

    def flush(self) -> str:
        """Text held back, when the sequence ends for another reason."""


@dataclass(slots=True)
class _Stream:
    """What goes out for one request. `told` once its first output was made."""

    sequence: Sequence
    text: Text
    told: bool = False


class RadixEngine:
    """An `Engine` (see replicas.engine) over a radix-tree KV cache.

    A step in which the runner fails ends its requests with ERROR and the engine goes on; a bug in
    the engine itself ends all requests, and every later one, with ERROR. `healthy` tells of both.
    """

    def __init__(
        self,
        limits: Limits,
        runner: Runner,
        eos: frozenset[int],
        open_text: Callable[[Request], Text],
        vocab_size: int,
    ) -> None:
        self.facts = Facts(
            engine="radix",
            block_size=limits.block_size,
            capacity_blocks=limits.blocks,
            max_context=limits.max_context,
            vocab_size=vocab_size,
            chunk_tokens=limits.chunk_tokens,
        )
        self._scheduler = Scheduler(limits, eos)
        self._runner = runner
        self._open_text = open_text
        self._cost = StepCost()
        self._load = self._scheduler.load(0.0, 0.0)
        self._streams: dict[int, _Stream] = {}
        self._outputs: list[Output] = []
        self._replies: list[Callable[[], None]] = []  # called after the step was emitted
        self._step = 0
        self._failures = 0  # failed steps in a row
        self._failure = ""  # the last of them
        self._broken = ""  # a bug that the engine does not survive
        self._inbox: list[Callable[[], None]] = []
        self._stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="radix-engine", daemon=True)
        self._emit: Callable[[Step], None]

    # From any thread

    def start(self, emit: Callable[[Step], None]) -> None:
        self._emit = emit
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, request: Request) -> None:
        self._post(lambda: self._submit(request))

    def cancel(self, id: int) -> None:
        self._post(lambda: self._end(id, Finish.CANCELLED))

    def snapshot(self, reply: Callable[[Seq[StoredRun]], None]) -> None:
        self._post(lambda: self._replies.append(lambda: reply(self._scheduler.tree.snapshot())))

    def pin(self, namespace: Namespace, prompt: bytes, ttl_s: float) -> "Future[int | None]":
        tree = self._scheduler.tree
        return self._call(lambda: tree.pin(namespace, prompt, ttl_s, time.monotonic()))

    def unpin(self, namespace: Namespace, prompt: bytes) -> "Future[int]":
        return self._call(lambda: self._scheduler.tree.unpin(namespace, prompt))

    def flush(self) -> "Future[None]":
        return self._call(lambda: self._scheduler.flush(time.monotonic()))

    def sleep(self, discard_weights: bool) -> None:
        return None

    def wake(self) -> None:
        return None

    def load(self) -> Load:
        return self._load

    def healthy(self) -> str:
        if self._broken:
            return self._broken
        if self._failures >= FAILURES:
            return f"the last {self._failures} steps failed: {self._failure}"
        return ""

    def _post(self, command: Callable[[], None]) -> bool:
        """Have a command run at the next step boundary; whether there will be one."""
        with self._wake:
            if not self._stopping:
                self._inbox.append(command)
                self._wake.notify()
            return not self._stopping

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function at the next step boundary; its future is done after that step's emit.

        Cancelled at once when the engine was stopped.
        """
        future: Future[T] = Future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
                raise
            self._replies.append(lambda: _resolve(future, result))

        if not self._post(command):
            future.cancel()
        return future

    # On the engine thread

    def _run(self) -> None:
        while True:
            commands, stopping = self._receive()
            for command in commands:
                self._guard(command)
            self._guard(partial(self._turn, stopping))
            if stopping:
                return

    def _guard(self, part: Callable[[], None]) -> None:
        """Run a part of a turn. A bug in it ends all requests; later parts still run."""
        try:
            part()
        except Exception as error:
            logger.exception("engine step failed")
            self._broken = f"engine broke: {error!r}"
            self._abandon()

    def _receive(self) -> tuple[list[Callable[[], None]], bool]:
        """Sleep while there is nothing to do; what was asked for meanwhile."""
        with self._wake:
            while not (self._inbox or self._stopping) and (self._broken or self._scheduler.idle):
                self._wake.wait()
            commands, self._inbox = self._inbox, []
            return commands, self._stopping

    def _turn(self, stopping: bool) -> None:
        if stopping:
            for id in list(self._streams):
                self._end(id, Finish.CANCELLED)
        computed = not (self._broken or self._scheduler.idle)
        if computed:
            self._compute()
        self._publish(computed)

    def _compute(self) -> None:
        """One step: plan, run, account."""
        scheduler = self._scheduler
        start = time.monotonic()
        chunks = scheduler.plan(start)
        try:
            sampled = self._runner.run(chunks) if chunks else []
        except Exception as error:
            logger.exception("runner failed on %d sequences", len(chunks))
            self._failures += 1
            self._failure = f"{type(error).__name__}: {error}"
            for chunk in chunks:
                self._end(chunk.sequence.request.id, Finish.ERROR, "the model runner failed")
            chunks, sampled = [], []
        now = time.monotonic()
        if chunks:
            self._failures = 0
            self._cost.observe(prefill_tokens(chunks), now - start)
        for advance in scheduler.commit(chunks, sampled, now):
            self._advance(advance, now)

    def _advance(self, advance: Advance, now: float) -> None:
        """Say what a step did to one request, and end it where a stop string matched."""
        sequence, sampled, finish = advance.sequence, advance.sampled, advance.finish
        id = sequence.request.id
        stream = self._streams[id]
        output = self._output(id)
        output.error = advance.error
        if sampled is not None:
            output.tokens = [sampled.token]
            output.logprobs = [sampled.logprobs] if sampled.logprobs else None
        shown = finish != Finish.STOP or sequence.request.sampling.include_stop
        if sampled is not None and shown:
            output.text, matched = stream.text.push(sampled.token)
            if matched is not None:
                self._scheduler.end(id, now)
                output.finish, output.stop_reason = Finish.STOP, matched
        if output.finish is None and finish is not None:
            output.finish = finish
            output.text += stream.text.flush()
        if output.finish is not None:
            self._forget(stream)

    def _submit(self, request: Request) -> None:
        tokens = array("I", request.prompt[: len(request.prompt) // 4 * 4])
        try:
            if self._broken:
                raise NeverRuns(self._broken)
            if tokens and max(tokens) >= self.facts.vocab_size:
                raise NeverRuns(f"token id {max(tokens)} is outside the vocabulary")
            sequence = self._scheduler.add(request, time.monotonic())
        except NeverRuns as error:
            self._outputs.append(Output(request.id, [], "", Finish.ERROR, error=str(error)))
        else:
            self._streams[request.id] = _Stream(sequence, self._open_text(request))

    def _end(self, id: int, finish: Finish, error: str = "") -> None:
        """End a request from outside the scheduler; unknown and finished ids are ignored."""
        if stream := self._streams.get(id):
            output = self._output(id)
            output.finish, output.error = finish, error
            self._scheduler.end(id, time.monotonic())
            self._forget(stream)

    def _output(self, id: int) -> Output:
        stream = self._streams[id]
        output = Output(id, [], "")
        if not stream.told:
            output.cached_tokens, stream.told = stream.sequence.cached_tokens, True
        self._outputs.append(output)
        return output

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.sequence.request.id]
        self._runner.forget(stream.sequence)

    def _publish(self, computed: bool) -> None:
        """Emit the step if it changed anything, then answer those who asked about its effects."""
        self._load = self._scheduler.load(self._cost.step_s, self._cost.prefill_s_per_token)
        changes = self._scheduler.tree.changes
        if computed or self._outputs or changes:
            self._step += 1
            stored, evicted = changes.drain()
            outputs, self._outputs = self._outputs, []
            gone = [EvictedRun(evicted)] if evicted else []
            self._emit(Step(self._step, outputs, stored, gone, self._load))
        replies, self._replies = self._replies, []
        for reply in replies:
            reply()

    def _abandon(self) -> None:
        """After a bug: end every request, as well as that still goes."""
        ended = {output.id for output in self._outputs if output.finish is not None}
        for id in self._streams.keys() - ended:
            self._outputs.append(Output(id, [], "", Finish.ERROR, error=self._broken))
        self._streams.clear()
        try:
            self._publish(computed=False)
        except Exception:
            logger.exception("cannot tell that the engine broke")


def _resolve(future: "Future[T]", result: T) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)
