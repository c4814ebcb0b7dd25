"""A process of its own that serves half an hour of random load at full speed, in little memory.

20 requests a second of many kinds: chats that go on, documents under system prompts, prompts that
come once, several tenants, cancels in every state, pins, priorities, a pool far too small. Prints
what is left of it: blocks, whatever is kept for a request, resident memory.
"""

import json
import os
import random
import sys
import threading
from array import array
from pathlib import Path

from replicas.engine import Finish, Namespace, Output, Request, Sampling, Step
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits
from replicas.radix.sequence import Chunk, Sampled, Sequence

REQUESTS_PER_S = 20
OUTSTANDING = 24
BLOCKS, BLOCK, CONTEXT = 96, 4, 160
VOCABULARY = 1000
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Untold:
    def push(self, token: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


class Runner:
    """Any token, at once; remembers for whom, as samplers do."""

    def __init__(self) -> None:
        self.known: set[Sequence] = set()
        self._rng = random.Random(0)

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        self.known.update(chunk.sequence for chunk in chunks if chunk.samples)
        token = self._rng.randrange
        return [Sampled(token(VOCABULARY)) if chunk.samples else None for chunk in chunks]

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)


class Crowd:
    """Keeps a number of requests outstanding; all but `begin` is called on the engine's thread."""

    def __init__(self, wanted: int) -> None:
        self.rng = random.Random(0)
        self.wanted, self.sent = wanted, 0
        self.ended: dict[str, int] = {}
        self.warm = self.largest = 0
        self.done = threading.Event()
        self.runner = Runner()
        limits = Limits(BLOCK, BLOCKS, CONTEXT, 48, 8, "longest_prefix", 0.05)
        self.engine = RadixEngine(
            limits, self.runner, frozenset({7}), lambda _: Untold(), VOCABULARY
        )
        self.open: dict[int, list[int]] = {}  # id -> tokens so far
        self.chats: list[list[int]] = []
        self.systems = [self.text(random.Random(i), 40) for i in range(6)]
        self.engine.start(self.step)

    def begin(self) -> None:
        for _ in range(OUTSTANDING):
            self.submit()

    def text(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    def prompt(self) -> list[int]:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.4 and self.chats:
            return self.chats.pop(rng.randrange(len(self.chats))) + self.text(rng, 6)
        if kind < 0.8:
            document = self.text(random.Random(rng.randrange(9)), 24)
            return rng.choice(self.systems) + document + self.text(rng, 6)
        return self.text(rng, rng.randint(1, 60))

    def submit(self) -> None:
        rng, prompt = self.rng, self.prompt()[: CONTEXT - 8]
        id, self.sent = self.sent, self.sent + 1
        space = Namespace("m", salt=rng.choice(("", "", "", "tenant")))
        sampling = Sampling(rng.randint(1, 24))
        data = array("I", prompt).tobytes()
        self.open[id] = prompt
        if rng.random() < 0.02:
            self.engine.pin(space, data, 0.05)
        self.engine.submit(Request(id, space, data, sampling, priority=rng.choice((0, 0, 1))))
        if rng.random() < 0.05:
            self.engine.cancel(id)

    def step(self, step: Step) -> None:
        for output in step.outputs:
            self.take(output)
        if self.rng.random() < 0.001:
            if self.sent > self.wanted // 5:
                self.warm = self.warm or resident()
            self.largest = max(self.largest, resident())

    def take(self, output: Output) -> None:
        self.open[output.id] += output.tokens
        if output.finish is None:
            if self.rng.random() < 0.005:
                self.engine.cancel(output.id)
            return
        tokens = self.open.pop(output.id)
        self.ended[output.finish.name] = self.ended.get(output.finish.name, 0) + 1
        if output.finish in (Finish.STOP, Finish.LENGTH) and len(tokens) < 120:
            self.chats = [*self.chats[-40:], tokens]
        if self.sent < self.wanted:
            self.submit()
        elif not self.open:
            self.done.set()

    def left(self) -> dict[str, int]:
        """What the engine still has, when nobody asks anything of it and its cache is flushed."""
        self.engine.flush().result(10)
        self.engine.stop()
        scheduler = self.engine._scheduler
        tree, waiting = scheduler.tree, scheduler._waiting
        return {
            "blocks": BLOCKS - scheduler.pool.available,
            "tree": tree.size + len(tree._roots) + len(tree._pins) + sum(map(len, tree._heaps)),
            "requests": len(scheduler._works) + len(scheduler._running) + len(waiting._works),
            "waiting": len(waiting._heap) + len(waiting._rota) + len(waiting._deferred),
            "streams": len(self.engine._streams) + len(self.runner.known),
        }


def main(seconds: int) -> None:
    crowd = Crowd(seconds * REQUESTS_PER_S)
    crowd.begin()
    if not crowd.done.wait(540):
        raise TimeoutError(f"{crowd.sent} requests sent, {len(crowd.open)} open")
    last = resident()
    load = crowd.engine.load()
    report = {"ended": crowd.ended, "evicted": load.evicted_blocks, "left": crowd.left()}
    print(json.dumps(report | {"warm": crowd.warm, "largest": crowd.largest, "last": last}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
