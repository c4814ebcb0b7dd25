"""The radix engine, which can sleep: what a device with its memory does is told by a test."""

import threading
from concurrent.futures import Future
from typing import Any

from gated_replica import PATIENCE_S

from replicas.engine import Step
from replicas.radix.engine import RadixEngine


class SleepyEngine(RadixEngine):
    """`trouble` is why a turn fails, `gate` lets it go on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trouble = ""
        self.gate = threading.Event()
        self.gate.set()
        self.turns: list[str] = []

    def sleep(self, discard_weights: bool) -> "Future[None]":
        done: Future[None] = Future()

        def wiped() -> None:
            self._step += 1
            self._emit(Step(self._step, [], [], [], self._load, wiped=True))
            self._settle(done)

        def drop() -> None:
            self._scheduler.flush(0.0)
            self._replies.append(wiped)

        self.turns.append("sleep")
        self._post(drop)
        return done

    def wake(self) -> "Future[None]":
        done: Future[None] = Future()
        self.turns.append("wake")
        self._post(lambda: self._settle(done))
        return done

    def _settle(self, done: "Future[None]") -> None:
        self.gate.wait(PATIENCE_S)
        if self.trouble:
            done.set_exception(RuntimeError(self.trouble))
        else:
            done.set_result(None)
