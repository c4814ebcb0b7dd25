"""The radix tree against a model that knows every cached block by its whole path."""

import random
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbranch.keys import block_keys, root
from replicas.engine import Namespace, StoredRun
from replicas.radix.pool import BlockPool
from replicas.radix.tree import Node, RadixTree, common_blocks

SIZE = 2  # tokens in a block
BLOCKS = 24
PROBATION = 8
SPACES = (Namespace("m"), Namespace("m", salt="other"))

Path = tuple[int, ...]  # one number for each block, spelled by `tokens`
Place = tuple[Namespace, Path]


def tokens(path: Path) -> bytes:
    return b"".join(
        b"\x07\0\0\0" + number.to_bytes(4, "little") for number in path
    )  # the blocks differ in their second token only


@cache
def key(place: Place) -> int:
    space, path = place
    return block_keys(tokens(path), SIZE, root(space.model, space.adapter, space.salt))[-1]


def prefixes(space: Namespace, path: Path) -> list[Place]:
    return [(space, path[:depth]) for depth in range(1, len(path) + 1)]


@dataclass
class Hold:
    """A lock on a path, down to its end."""

    space: Namespace
    path: Path
    node: Node


@dataclass
class Twin:
    """A tree, and what must be in it. Every operation is checked on both sides."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS))
    tree: RadixTree = field(default_factory=lambda: RadixTree(SIZE, BLOCKS // 4, PROBATION))
    cached: dict[Place, int] = field(default_factory=dict)  # block of a path's last block
    used: dict[Place, float] = field(default_factory=dict)
    proven: set[Place] = field(default_factory=set)  # found again since computed
    holds: list[Hold] = field(default_factory=list)
    pins: dict[Place, tuple[list[Place], float]] = field(default_factory=dict)
    view: set[int] = field(default_factory=set)  # what a reader of the changes believes
    now: float = 0.0

    def tick(self) -> float:
        self.now += 1
        return self.now

    def expire(self) -> None:
        self.pins = {name: pin for name, pin in self.pins.items() if pin[1] > self.now}

    def touch(self, places: list[Place]) -> None:
        self.used.update(dict.fromkeys(places, self.now))

    def known(self, space: Namespace, path: Path) -> list[Place]:
        return [place for place in prefixes(space, path) if place in self.cached]

    def pinned(self) -> set[Place]:
        return {place for places, _ in self.pins.values() for place in places}

    def loose(self) -> set[Place]:
        held = {place for hold in self.holds for place in prefixes(hold.space, hold.path)}
        return self.cached.keys() - held - self.pinned()

    def match(self, space: Namespace, path: Path, limit: int) -> None:
        depth = len(self.known(space, path[: limit // SIZE]))
        assert self.tree.resident(space, tokens(path), limit) == depth * SIZE

    def acquire(self, space: Namespace, path: Path, limit: int) -> None:
        prefix = self.tree.acquire(space, tokens(path), limit, self.tick())
        places = self.known(space, path[: limit // SIZE])
        assert prefix.blocks == [self.cached[place] for place in places]
        self.touch(places)
        self.proven.update(places)
        self.holds.append(Hold(space, path[: len(places)], prefix.node))

    def extend(self, index: int, tail: Path) -> None:
        hold = self.holds[index % len(self.holds)]
        if self.pool.available < len(tail):
            self.evict(len(tail) - self.pool.available)
        own = self.pool.alloc(min(len(tail), self.pool.available))
        tail = tail[: len(own)]
        if not tail:
            return
        extension = self.tree.extend(hold.node, tokens(tail), own, self.tick())
        places = prefixes(hold.space, hold.path + tail)[len(hold.path) :]
        there = [self.cached[place] for place in places if place in self.cached]
        assert extension.resident == there
        self.pool.free(own[: len(there)])
        self.cached.update(zip(places[len(there) :], own[len(there) :], strict=True))
        self.touch(places)
        hold.path, hold.node = hold.path + tail, extension.node

    def release(self, index: int) -> None:
        hold = self.holds.pop(index % len(self.holds))
        self.tree.release(hold.node, self.tick())
        self.touch(prefixes(hold.space, hold.path))

    def evict(self, want: int) -> None:
        self.tick()
        self.expire()
        expected: list[int] = []
        while len(expected) < want and (loose := self.loose()):
            inner = {(space, path[:-1]) for space, path in self.cached}
            leaves = loose - inner
            unproven = self.cached.keys() - self.proven
            if len(unproven) > PROBATION:
                leaves = leaves & unproven or leaves
            victim = min(leaves, key=lambda place: self.used[place])
            self.proven.discard(victim)
            expected.append(self.cached.pop(victim))
        freed = self.tree.evict(want, self.now)
        assert freed == expected
        self.pool.free(freed)

    def pin(self, space: Namespace, path: Path, ttl: int) -> None:
        self.tick()
        self.expire()
        places = self.known(space, path)
        name = (space, path)
        total = self.pinned() | set(places)
        count = self.tree.pin(space, tokens(path), ttl, self.now)
        if places and (len(total) > BLOCKS // 4 or len({*self.pins, name}) > BLOCKS // 4):
            assert count is None
            return
        assert count == len(places)
        if places:
            self.pins[name] = (places, self.now + ttl)
            self.touch(places)

    def unpin(self, space: Namespace, path: Path) -> None:
        places, _ = self.pins.pop((space, path), ([], 0.0))
        assert self.tree.unpin(space, tokens(path)) == len(places)

    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.expire()
        self.tree.expire(self.now)

    def flush(self) -> None:
        self.tick()
        self.pins = {}
        freed = self.tree.flush(self.now)
        loose = self.loose()
        assert sorted(freed) == sorted(self.cached.pop(place) for place in loose)
        self.proven &= self.cached.keys()
        self.pool.free(freed)

    def check(self) -> None:
        assert self.tree.size == len(self.cached) == BLOCKS - self.pool.available
        self.wait(0)
        assert self.tree.evictable == len(self.loose())
        assert self.tree.unproven == len(self.cached.keys() - self.proven)
        assert self.tree.pinned == len(self.pinned()) <= BLOCKS // 4
        self.read_changes()
        assert self.view == keys_of(self.tree.snapshot()) == {key(place) for place in self.cached}
        for node in self.tree.nodes():
            assert len(node.blocks) == len(node.keys) == len(node.tokens) // (SIZE * 4)

    def read_changes(self) -> None:
        """Apply the changes as a reader would, who refuses orphans and doubles."""
        stored, evicted = self.tree.changes.drain()
        heads = {key((space, path[:1])) for space, path in self.used}
        for run in stored:
            assert run.parent is None or run.parent in self.view
            assert (run.parent is None) == (run.keys[0] in heads)
            assert not self.view & set(run.keys)
            self.view.update(run.keys)
        parents = {
            key(place): key((place[0], place[1][:-1])) for place in self.used if place[1][1:]
        }
        for at, block in enumerate(evicted):
            assert block in self.view
            assert parents.get(block) not in evicted[:at]
        self.view.difference_update(evicted)


def keys_of(runs: list[StoredRun]) -> set[int]:
    """All keys of a snapshot, whose runs must come after their parents."""
    keys: set[int] = set()
    for run in runs:
        assert run.parent is None or run.parent in keys
        keys.update(run.keys)
    return keys


spaces = st.sampled_from(SPACES)
paths = st.lists(st.integers(0, 2), max_size=7).map(tuple)
indexes = st.integers(0, 99)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin()

    @rule(space=spaces, path=paths, limit=st.integers(0, 16))
    def match(self, space: Namespace, path: Path, limit: int) -> None:
        self.twin.match(space, path, limit)

    @rule(space=spaces, path=paths, limit=st.integers(0, 16))
    def acquire(self, space: Namespace, path: Path, limit: int) -> None:
        if len(self.twin.holds) < 6:
            self.twin.acquire(space, path, limit)

    @rule(space=spaces, path=paths)
    def insert(self, space: Namespace, path: Path) -> None:
        """A whole short life: acquire what is there, store the rest, let go."""
        self.twin.acquire(space, path, 16)
        known = len(self.twin.holds[-1].path)
        self.twin.extend(len(self.twin.holds) - 1, path[known:])
        self.twin.release(len(self.twin.holds) - 1)

    @rule(index=indexes, tail=paths)
    def extend(self, index: int, tail: Path) -> None:
        if self.twin.holds:
            self.twin.extend(index, tail)

    @rule(index=indexes)
    def release(self, index: int) -> None:
        if self.twin.holds:
            self.twin.release(index)

    @rule(want=st.integers(0, 8))
    def evict(self, want: int) -> None:
        self.twin.evict(want)

    @rule(space=spaces, path=paths, ttl=st.integers(1, 9))
    def pin(self, space: Namespace, path: Path, ttl: int) -> None:
        self.twin.pin(space, path, ttl)

    @rule(space=spaces, path=paths)
    def unpin(self, space: Namespace, path: Path) -> None:
        self.twin.unpin(space, path)

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.twin.wait(seconds)

    @rule()
    def flush(self) -> None:
        self.twin.flush()

    @invariant()
    def agree(self) -> None:
        self.twin.check()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_ten_thousand_random_steps_leak_nothing() -> None:
    twin, rng = Twin(), random.Random(7)
    for step in range(10_000):
        space = rng.choice(SPACES)
        path = tuple(rng.randrange(3) for _ in range(rng.randrange(8)))
        match rng.randrange(12):
            case 0 | 1 | 2 if len(twin.holds) < 5:
                twin.acquire(space, path, 16)
            case 3 | 4 | 5 | 6 if twin.holds:
                twin.extend(rng.randrange(9), path[: rng.randrange(5)])
            case 7 | 8 if twin.holds:
                twin.release(rng.randrange(9))
            case 9:
                twin.evict(rng.randrange(5))
            case 10:
                twin.pin(space, path, rng.randrange(1, 30))
            case 11 if rng.random() < 0.1:
                twin.flush()
            case _:
                twin.match(space, path, rng.randrange(17))
        if step % 50 == 0:
            twin.check()
    while twin.holds:
        twin.release(0)
    twin.flush()
    twin.check()
    assert twin.tree.size == 0
    assert twin.pool.available == BLOCKS


def stored(tree: RadixTree, path: Path, first_block: int, now: float) -> None:
    held = tree.acquire(SPACES[0], tokens(path), 1000, now)
    known = len(held.blocks)
    fresh = range(first_block, first_block + len(path) - known)
    node = tree.extend(held.node, tokens(path[known:]), fresh, now).node
    tree.release(node, now)


def test_evicts_the_oldest_branch_from_its_tail_up_to_the_fork() -> None:
    tree = RadixTree(SIZE, pin_limit=4, probation=PROBATION)
    stored(tree, (0, 1, 2), 10, now=1)  # blocks 10 11 12
    stored(tree, (0, 5, 6), 20, now=2)  # 0 is shared, then 20 21
    assert tree.evict(1, now=3) == [12]
    assert tree.evict(2, now=3) == [11, 21]
    assert tree.evict(9, now=3) == [20, 10]
    assert tree.evict(1, now=3) == []


def test_a_pin_keeps_what_is_above_its_end_but_not_what_is_below() -> None:
    tree = RadixTree(SIZE, pin_limit=2, probation=PROBATION)
    stored(tree, (0, 1, 2), 10, now=1)
    assert tree.pin(SPACES[0], tokens((0, 1, 2)), 5, now=2) is None
    assert tree.pin(SPACES[0], tokens((0, 1)), 5, now=2) == 2
    assert tree.evict(9, now=6) == [12]
    assert tree.evict(9, now=7) == [11, 10]


def test_there_are_no_more_pins_than_blocks_they_may_hold() -> None:
    tree = RadixTree(SIZE, pin_limit=2, probation=PROBATION)
    stored(tree, (0,), 10, now=1)
    assert tree.pin(SPACES[0], tokens((0, 1)), 5, now=2) == 1
    assert tree.pin(SPACES[0], tokens((0, 2)), 5, now=2) == 1
    assert tree.pin(SPACES[0], tokens((0, 3)), 5, now=2) is None
    assert tree.pin(SPACES[0], tokens((0, 2)), 5, now=3) == 1  # a renewal
    assert tree.pin(SPACES[0], tokens((0, 3)), 5, now=7) == 1  # the first has expired


def test_a_block_evicted_and_stored_again_within_a_step_is_no_change() -> None:
    tree = RadixTree(SIZE, pin_limit=0, probation=PROBATION)
    stored(tree, (0, 1, 2), 10, now=1)
    tree.changes.drain()
    tree.evict(2, now=2)
    stored(tree, (0, 1, 5), 20, now=3)
    runs, evicted = tree.changes.drain()
    assert evicted == [key((SPACES[0], (0, 1, 2)))]
    assert runs == [StoredRun(key((SPACES[0], (0, 1))), (key((SPACES[0], (0, 1, 5))),))]


def test_chunk_after_chunk_hashes_every_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counting(token_ids: bytes, block_size: int, parent: int) -> list[int]:
        nonlocal hashed
        hashed += len(token_ids) // (block_size * 4)
        return block_keys(token_ids, block_size, parent)

    monkeypatch.setattr("replicas.radix.tree.block_keys", counting)
    tree = RadixTree(SIZE, pin_limit=0, probation=PROBATION)
    node = tree.acquire(SPACES[0], b"", 0, 0).node
    for number in range(1000):
        node = tree.extend(node, tokens((number,)), [number], 0).node
    assert hashed == 1000
    assert len(list(tree.nodes())) == 1


def test_a_path_of_ten_thousand_nodes() -> None:
    tree = RadixTree(SIZE, pin_limit=10_000, probation=PROBATION)
    path = tuple(range(10_000))
    stored(tree, path, 0, now=0)
    spelled = tokens(path)
    for depth in reversed(path):
        tree.acquire(SPACES[0], spelled, depth * SIZE, 0)
    assert len(list(tree.nodes())) == len(path)
    assert tree.resident(SPACES[0], spelled, 30_000) == SIZE * len(path)
    assert tree.pin(SPACES[0], spelled, 1, now=1) == len(path)
    assert sum(len(run.keys) for run in tree.snapshot()) == len(path)
    assert tree.evict(9, now=3) == [9_999]


def test_common_blocks_finds_the_first_difference() -> None:
    run = tokens(tuple(range(40)))
    for depth in range(40):
        other = tokens((99,)) + tokens((*range(depth), 99, *range(depth + 1, 40)))
        assert common_blocks(run, other, SIZE * 4, SIZE * 4) == depth
    assert common_blocks(run, run[:-1], 0, SIZE * 4) == 39


def test_double_frees_and_double_releases_raise() -> None:
    pool = BlockPool(2)
    (block,) = pool.alloc(1)
    pool.free([block])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([block])
    with pytest.raises(IndexError, match="3 blocks wanted"):
        pool.alloc(3)
    tree = RadixTree(SIZE, pin_limit=0, probation=PROBATION)
    node = tree.acquire(SPACES[0], b"", 0, 0).node
    tree.release(node, 0)
    with pytest.raises(ValueError, match="released twice"):
        tree.release(node, 0)
