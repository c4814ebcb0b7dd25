"""Cache views behind channels that drop, delay, duplicate, reorder, cut; replicas that start anew.

gRPC keeps a stream whole and in order. What is broken here is each delta's place in it: a slip on
either side must show in the sequence number. Snapshot messages carry none, so they stay whole.
"""

import random
from collections import deque

import pytest

from hotbranch.keys import block_keys, root
from hotbranch.v1.cache_pb2 import (
    TIER_CPU,
    CacheDelta,
    CacheUpdate,
    Evicted,
    Load,
    Run,
    Snapshot,
)
from router.fleet.watcher import ViewLost
from router.index.index import Index
from router.index.view import View

SEEDS = 1200
EVENTS = 60
FAULTS = ("drop", "duplicate", "delay", "hurry")
Path = tuple[int, ...]  # a namespace, then the tokens of its blocks of one token


def _names() -> dict[Path, int]:
    names: dict[Path, int] = {(space,): root("m", salt=str(space)) for space in range(2)}
    paths = deque(names)
    while paths:
        path = paths.popleft()
        for token in range(3) if len(path) < 6 else ():
            token_bytes = token.to_bytes(4, "little")
            names[*path, token] = block_keys(token_bytes, 1, names[path])[0]
            paths.append((*path, token))
    return names


KEYS = _names()
LEAVES = [path for path in KEYS if len(path) == 6]


class Replica:
    """Holds paths, and tells its wires of every change by the rules of cache.proto."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: set[Path] = set()
        self.sequence = 0
        self.wires: list[Wire] = []
        self.history: dict[tuple[int, int], frozenset[int]] = {}
        self.begin()

    def begin(self) -> None:
        """A new epoch with what is left of the cache. Numbers start again, or go on by chance."""
        self.epoch = self.rng.getrandbits(64)
        self.sequence *= self.rng.randint(0, 1)
        for path in self.rng.sample(sorted(self.held), self.rng.randint(0, len(self.held))):
            self.held -= set(self.below(path))
        self.note()

    def note(self) -> None:
        self.history[self.epoch, self.sequence] = self.keys()

    def keys(self) -> frozenset[int]:
        return frozenset(KEYS[path] for path in self.held)

    def depth(self, path: Path) -> int:
        return sum(path[:end] in self.held for end in range(2, len(path) + 1))

    def below(self, path: Path) -> list[Path]:
        """The path and what is below it, children before parents."""
        found = [other for other in self.held if other[: len(path)] == path]
        return sorted(found, key=len, reverse=True)

    def step(self) -> None:
        """Something changes: at times all is cleared; runs are stored; branches are evicted."""
        delta = CacheDelta(sequence=self.sequence + 1, cleared=self.rng.random() < 0.03)
        if delta.cleared:
            self.held.clear()
        for _ in range(self.rng.randint(0, 2)):
            self.store(delta)
        for _ in range(self.rng.randint(0, 2) if len(self.held) > 8 else 0):
            self.evict(delta)
        if self.rng.random() < 0.1:
            self.move(delta)
        self.sequence += 1
        self.note()
        for wire in self.wires:
            wire.send(CacheUpdate(epoch=self.epoch, delta=delta))

    def store(self, delta: CacheDelta) -> None:
        path = self.rng.choice(LEAVES)[: self.rng.randint(2, 6)]
        first = self.depth(path) + 2
        split = self.rng.randint(first, len(path) + 1)  # at times two runs, parents first
        for start, stop in ((first, split), (split, len(path) + 1)):
            keys = [KEYS[path[:end]] for end in range(start, stop)]
            if keys:
                delta.stored.append(Run(parent=KEYS[path[: start - 1]], keys=keys))
        self.held.update(path[:end] for end in range(first, len(path) + 1))

    def evict(self, delta: CacheDelta) -> None:
        if not self.held:
            return
        path = self.rng.choice(sorted(self.held))
        gone = self.below(path)
        self.held.difference_update(gone)
        delta.evicted.append(Evicted(keys=[KEYS[path] for path in gone]))

    def move(self, delta: CacheDelta) -> None:
        """Something happens on another tier, which is no business of the view."""
        path = self.rng.choice(LEAVES)[: self.rng.randint(2, 6)]
        if path in self.held:
            delta.evicted.append(Evicted(keys=[KEYS[path]], tier=TIER_CPU))
        else:
            delta.stored.append(Run(parent=KEYS[path[:-1]], keys=[KEYS[path]], tier=TIER_CPU))

    def snapshot(self) -> list[CacheUpdate]:
        """All that is held, in one message or several."""
        runs: list[Run] = []
        before: Path = ()
        for path in sorted(self.held):  # parents before children
            if not runs or path[:-1] != before:
                runs.append(Run(parent=KEYS[path[:-1]]))
            runs[-1].keys.append(KEYS[path])
            before = path
        size = self.rng.randint(1, len(runs) + 1)
        parts = [Snapshot(runs=runs[at : at + size]) for at in range(0, len(runs) + 1, size)]
        parts[-1].last = True
        parts[-1].sequence = self.sequence
        return [CacheUpdate(epoch=self.epoch, snapshot=part) for part in parts]


class Wire:
    """One stream of a replica into a view, and the loop of `Link._watch_cache` at its end.

    After every message: a view that is current equals what the replica held at that number; one
    that has just seen another epoch holds nothing of the old one.
    """

    def __init__(self, replica: Replica, index: Index, holder: str, rng: random.Random) -> None:
        self.replica = replica
        self.index = index
        self.holder = holder
        self.rng = rng
        self.view = View(index, holder)
        self.faults: dict[str, float] = {}
        self.stream: deque[CacheUpdate] | None = None  # sent, not received; None: not watching
        self.late: list[CacheUpdate] = []
        self.epoch: int | None = None
        replica.wires.append(self)

    def watch(self) -> None:
        self.view.restart()
        self.stream = deque(self.replica.snapshot())
        self.late = []

    def send(self, update: CacheUpdate) -> None:
        """A delta or a load leaves the replica; the channel does with a delta what it likes."""
        if self.stream is None:
            return
        late, self.late = self.late, []
        fault = ""
        if update.HasField("delta") and self.rng.random() < sum(self.faults.values()):
            fault = self.rng.choices(list(self.faults), list(self.faults.values()))[0]
        if fault == "hurry":
            self.stream.insert(self.rng.randint(0, len(self.stream)), update)
        elif fault not in ("drop", "delay"):
            self.stream.append(update)
        if fault in ("duplicate", "delay"):
            self.late.append(update)
        self.stream.extend(late)

    def snapshot_again(self) -> None:
        """A snapshot on the same stream. What was delayed comes after it."""
        if self.stream is not None:
            self.stream.extend([*self.replica.snapshot(), *self.late])
            self.late = []

    def receive(self) -> None:
        """Take the next message, if there is one."""
        if not self.stream:
            return
        update = self.stream.popleft()
        if update.HasField("load"):
            return
        another = self.epoch is not None and update.epoch != self.epoch
        self.epoch = update.epoch
        try:
            self.view.apply(update)
        except ViewLost as lost:
            self.lost(lost.reason)
        held = self.index.held(self.holder)
        if self.stream is not None and self.view.current:
            number = (update.delta if update.HasField("delta") else update.snapshot).sequence
            assert held == self.replica.history[update.epoch, number]
        elif another:
            assert held == frozenset()

    def lost(self, reason: str) -> None:
        """The view is lost, or the stream ended or overflowed: it will be watched again."""
        self.view.lost(reason)
        self.stream = None

    def disconnect(self) -> None:
        """The connection broke, or was silent for too long."""
        self.view.forget()
        self.stream = None
        self.epoch = None
        assert self.index.held(self.holder) == frozenset()

    def cut(self) -> None:
        if self.stream is not None:
            reason = self.rng.choice(("ended", "overflow", ""))
            self.lost(reason) if reason else self.disconnect()

    def drain(self) -> None:
        while self.stream:
            self.receive()

    def settle(self) -> None:
        """All is delivered in order; one watch more, if the view was lost, must be enough."""
        self.faults = {}
        self.drain()
        if self.stream is None:
            self.watch()
            self.drain()
        assert self.stream is not None


class World:
    """Replicas, and routers that each watch all of them over channels of their own."""

    def __init__(self, seed: int, replicas: int, routers: int, fault: float) -> None:
        self.rng = random.Random(seed)
        self.replicas = {f"r{i}": Replica(self.rng) for i in range(replicas)}
        self.indexes = [Index() for _ in range(routers)]
        self.wires = [
            Wire(replica, index, holder, self.rng)
            for index in self.indexes
            for holder, replica in self.replicas.items()
        ]
        for wire in self.wires:
            wire.faults = dict.fromkeys(FAULTS, fault / len(FAULTS))

    def event(self) -> None:
        rng = self.rng
        replica = rng.choice(list(self.replicas.values()))
        kind = rng.choices(
            ("step", "receive", "load", "cut", "flush", "restart", "snapshot"),
            (42, 40, 6, 4, 3, 3, 2),
        )[0]
        if kind == "step":
            replica.step()
        elif kind in ("flush", "restart"):
            replica.begin()
        for wire in replica.wires:
            if kind == "receive" and wire.stream is None:
                wire.watch()
            elif kind == "receive":
                for _ in range(rng.randint(1, 6)):
                    wire.receive()
            elif kind == "load":
                wire.send(CacheUpdate(epoch=replica.epoch, load=Load(running=1)))
            elif kind in ("flush", "snapshot"):
                wire.snapshot_again()
            elif kind == "restart":
                wire.cut()
        if kind == "cut":
            rng.choice(replica.wires).cut()

    def quiet(self) -> None:
        """A dropped last delta shows at the next one, so every replica says one thing more."""
        for wire in self.wires:
            wire.settle()
        for replica in self.replicas.values():
            replica.step()
        for wire in self.wires:
            wire.settle()

    def check(self) -> None:
        paths = [self.rng.choice(LEAVES)[: self.rng.randint(2, 6)] for _ in range(6)]
        union = frozenset().union(*(replica.keys() for replica in self.replicas.values()))
        for index in self.indexes:
            assert index.blocks == len(union)
            for holder, replica in self.replicas.items():
                assert index.held(holder) == replica.keys()
                assert index.held_count(holder) == len(replica.held)
            for path in paths:
                match = index.match([KEYS[path[:end]] for end in range(2, len(path) + 1)])
                for holder, replica in self.replicas.items():
                    assert match.depth(holder) == replica.depth(path)


def test_after_any_chaos_the_index_is_exact() -> None:
    reasons = set()
    for seed in range(SEEDS):
        world = World(seed, replicas=3, routers=1, fault=0.1)
        try:
            for _ in range(EVENTS):
                world.event()
            world.quiet()
            assert all(wire.view.current for wire in world.wires)
            world.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        reasons.update(*(wire.view.resyncs for wire in world.wires))
    assert reasons == {"gap", "no_snapshot", "ended", "overflow"}  # the chaos reached them all


def running(seed: int) -> tuple[World, Wire]:
    """Two replicas with something in their caches, known to a router; and the wire of one."""
    world = World(seed, replicas=2, routers=1, fault=0.0)
    for wire in world.wires:
        wire.watch()
        while len(wire.replica.held) < 5:
            wire.replica.step()
        wire.drain()
    return world, world.wires[0]


@pytest.mark.parametrize("fault", ["drop", "duplicate", "delay"])
def test_field_report_10_a_sequence_gap_is_detected_and_recovered(fault: str) -> None:
    for seed in range(50):
        world, wire = running(seed)
        wire.faults = {fault: 1.0}
        wire.replica.step()
        wire.faults = {}
        wire.replica.step()
        wire.drain()
        assert not wire.view.current
        world.quiet()
        world.check()
        assert wire.view.resyncs == {"gap": 1}


def test_field_report_12_a_restart_leaves_no_ghosts_though_its_numbers_go_on() -> None:
    """The worst case: no cut is seen, and the number of the new epoch's delta is the next one."""
    numbers = set()
    for seed in range(50):
        world, wire = running(seed)
        before = wire.replica.sequence
        wire.replica.begin()
        numbers.add(wire.replica.sequence - before == 0)
        wire.replica.step()
        wire.receive()
        assert wire.index.held(wire.holder) == frozenset()
        assert wire.view.resyncs == {"no_snapshot": 1}
        world.quiet()
        world.check()
    assert numbers == {True, False}


def test_field_report_13_a_reset_purges_with_its_first_message() -> None:
    parts = set()
    for seed in range(50):
        world, wire = running(seed)
        wire.replica.begin()
        wire.snapshot_again()
        parts.add(len(wire.stream or ()) > 1)
        wire.receive()
        if wire.stream:  # the snapshot is not complete
            assert wire.index.held(wire.holder) == frozenset()
        wire.drain()
        world.check()
        assert not wire.view.resyncs
    assert parts == {True, False}


def test_field_report_16_eight_routers_know_the_same() -> None:
    """Each behind bad channels of its own. Knowing the same, they hit as often as one."""
    for seed in range(40):
        world = World(seed, replicas=2, routers=8, fault=0.1)
        for _ in range(EVENTS):
            world.event()
        world.quiet()
        world.check()
