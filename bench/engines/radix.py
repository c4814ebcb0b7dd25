"""Our engine, for `bench.engine`: `python -m bench.engines.radix DEVICE KV_TOKENS THREADS`.

The model is loaded once; `open` starts a new scheduler with an empty tree over its KV pool.
"""

import json
import sys
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TextIO

from bench.engines.closed_loop import Ask, ClosedLoop
from bench.engines.products import Products
from bench.engines.random_llama import random_llama
from hotbranch.embedded import resolve_model
from hotbranch.settings import EngineSettings
from replicas.engine import Finish, Namespace, Request, Sampling, Step
from replicas.radix.engine import RadixEngine
from replicas.radix.runner import ModelRunner, load
from replicas.radix.scheduler import Limits
from replicas.radix.tree import RadixTree

PATIENCE_S = 3600.0  # no run is that long: the bound on waiting is measured elsewhere


class Untold:
    """No text: both engines deal in token ids here."""

    def push(self, token: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


class TreeClock:
    """Seconds spent inside a tree; a call that the tree makes itself is counted once."""

    METHODS = ("resident", "path", "acquire", "extend", "release", "evict", "expire")

    def __init__(self, tree: RadixTree) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in self.METHODS:
            setattr(tree, name, self._timed(getattr(tree, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._inside:
                return method(*arguments)
            self._inside = True
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self._inside = False

        return call


class Run:
    """One load on a started engine. Replies come on the engine's thread, which asks the next."""

    def __init__(self, engine: RadixEngine, loop: ClosedLoop, reuse: bool) -> None:
        self._engine, self._loop, self._reuse = engine, loop, reuse
        self._replies: dict[int, list[int]] = {}
        self._cached: dict[int, int] = {}
        self._over = threading.Event()
        self._error = ""

    def seconds(self) -> float:
        """Play the load to its end. Raises RuntimeError when a request fails."""
        began = time.perf_counter()
        for ask in self._loop.begin():
            self._submit(ask)
        self._over.wait()
        took = time.perf_counter() - began
        if self._error:
            raise RuntimeError(self._error)
        return took

    def step(self, step: Step) -> None:
        for output in step.outputs:
            reply = self._replies.setdefault(output.id, [])
            reply += output.tokens
            if output.cached_tokens is not None:
                self._cached[output.id] = output.cached_tokens
            if output.finish is not None:
                self._end(output.id, output.finish, output.error)

    def _end(self, id: int, finish: Finish, error: str) -> None:
        if finish != Finish.LENGTH:
            self._error = f"request ended with {finish.name}: {error}"
            self._over.set()
            return
        ask = self._loop.answered(id, self._replies.pop(id), self._cached.pop(id))
        if ask is not None:
            self._submit(ask)
        elif self._loop.done:
            self._over.set()

    def _submit(self, ask: Ask) -> None:
        # Under a namespace of its own a request finds nothing, and nothing finds it.
        space = Namespace("bench", salt="" if self._reuse else str(ask.id))
        sampling = Sampling(max_tokens=ask.reply, ignore_eos=True)
        prompt = array("I", ask.prompt).tobytes()
        self._engine.submit(Request(ask.id, space, prompt, sampling))


class RadixSide:
    """The commands."""

    def __init__(self, runner: ModelRunner, settings: EngineSettings) -> None:
        self._runner = runner
        self._limits = Limits.of(settings, runner.max_context)
        self._engine: RadixEngine | None = None
        self._run: Run | None = None
        self._reuse = True
        self._first_id = 0
        self._clock: TreeClock | None = None
        self._products: Products | None = None

    def open(
        self,
        kv_tokens: int,
        running: int,
        policy: str = "",
        reuse: bool = True,
        clock: bool = False,
    ) -> dict[str, Any]:
        """An engine with an empty cache of `kv_tokens`; the default policy when none is named."""
        self.close()
        limits = replace(
            self._limits,
            blocks=kv_tokens // self._limits.block_size,
            max_running=running,
            starvation_s=PATIENCE_S,
        )
        if policy:
            limits = replace(limits, policy=policy)  # type: ignore[arg-type]  # it was checked
        runner = self._runner
        engine = RadixEngine(
            limits, runner, frozenset(), lambda _request: Untold(), runner.vocab_size
        )
        self._clock = TreeClock(engine._scheduler.tree) if clock else None
        engine.start(self._emit)
        self._engine, self._reuse = engine, reuse
        return {}

    def run(self, sessions: list[Any], outstanding: int) -> dict[str, Any]:
        assert self._engine is not None
        loop = ClosedLoop(sessions, outstanding, self._first_id)
        self._run = Run(self._engine, loop, self._reuse)
        before = self._clock.seconds if self._clock else 0.0
        seconds = self._run.seconds()
        self._first_id = loop.next_id
        tree = {"tree_seconds": self._clock.seconds - before} if self._clock else {}
        return loop.report(seconds) | tree

    def close(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def products(self, rows: int) -> dict[str, Any]:
        """On a thread of its own, while there is no other: OpenMP gives each some that wait."""
        self.close()
        self._products = self._products or Products(self._runner)
        with ThreadPoolExecutor(1) as thread:
            return {"seconds": thread.submit(self._products.seconds, rows).result()}

    def _emit(self, step: Step) -> None:
        if self._run is not None:
            self._run.step(step)


def main(answers: TextIO) -> None:
    device, kv_tokens, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    settings = EngineSettings(device=device, kv_tokens=kv_tokens, threads=threads)
    if device == "cuda":
        name, runner = "random Llama-3.1-8B", random_llama(settings)
    else:
        name, directory = resolve_model(settings.model, settings.cache_dir)
        runner = load(directory, settings)
    side = RadixSide(runner, settings)
    facts = {"model": name, "dtype": str(runner.dtype).removeprefix("torch.")}
    print(json.dumps(facts | {"policy": settings.policy}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdout)
