"""Which request goes to vLLM next, and when: the part that needs no vLLM."""

import struct
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbranch.keys import block_keys, root
from hotbranch.tier import Tier
from replicas.engine import EvictedRun, Namespace, Request, Sampling, StoredRun
from replicas.vllm.admission import AHEAD, OVERDUE, Admission, Room
from replicas.vllm.mirror import Mirror
from replicas.vllm.pins import SHARE, Pins

BLOCK = 4
CHUNK = 16
SPACE = Namespace("m")
ROOM = Room(blocks=64, chunk_tokens=CHUNK, max_running=8)


def prompt(tokens: Iterable[int]) -> bytes:
    ids = [*tokens]
    return struct.pack(f"<{len(ids)}I", *ids)


def keys(tokens: Iterable[int], space: Namespace = SPACE) -> list[int]:
    return block_keys(prompt(tokens), BLOCK, root(space.model, space.adapter, space.salt))


def store(mirror: Mirror, tokens: Iterable[int], space: Namespace = SPACE) -> None:
    mirror.store([StoredRun(None, keys(tokens, space))])


class Bench:
    """An admission and what it handed over; nobody computes unless told to."""

    def __init__(self, room: Room = ROOM, policy: str = "longest_prefix") -> None:
        self.mirror = Mirror(BLOCK)
        self.admission = Admission(self.mirror, room, policy, starvation_s=60.0)  # type: ignore[arg-type]

    def add(self, id: int, tokens: Iterable[int], now: float = 0.0, priority: int = 0) -> None:
        sampling = Sampling(max_tokens=8)
        self.admission.add(Request(id, SPACE, prompt(tokens), sampling, priority), now)

    def go(self, now: float = 0.0, used: int = 0) -> list[int]:
        """Ids handed over until no more are."""
        ids = []
        while (admitted := self.admission.next(used, now)) is not None:
            ids.append(admitted.work.sequence.request.id)
        return ids

    def compute(self, *ids: int) -> None:
        """Their prompts are computed, and have a token each."""
        for id in ids:
            self.admission.generated(id, 1)


def test_no_more_goes_in_than_two_steps_prefill() -> None:
    bench = Bench()
    for id in range(10):
        bench.add(id, range(100 * id, 100 * id + CHUNK))
    assert bench.go() == [0, 1], f"{AHEAD} chunks are ahead"
    bench.compute(0)
    assert bench.go() == [2]
    assert bench.admission.waiting == 7
    assert bench.admission.running == 3


def test_progress_inside_a_long_prompt_makes_room() -> None:
    bench = Bench()
    bench.add(0, range(3 * CHUNK))
    bench.add(1, range(500, 500 + CHUNK))
    assert bench.go() == [0]
    bench.admission.prefilled(CHUNK)
    assert bench.admission.ahead == 2 * CHUNK
    assert bench.go() == []
    bench.admission.prefilled(CHUNK)
    assert bench.go() == [1], "the last chunk is not computed alone"


def test_the_longest_prefix_goes_first_when_room_is_short() -> None:
    bench = Bench(Room(blocks=16, chunk_tokens=CHUNK, max_running=8))
    store(bench.mirror, range(200, 212))
    bench.add(0, range(100, 116))
    bench.add(1, range(300, 316))
    bench.add(2, [*range(200, 212), 1, 2, 3, 4])
    assert bench.go()[0] == 2


def test_twins_wait_for_the_first_of_them() -> None:
    bench = Bench()
    bench.add(0, [*range(12), 1])
    bench.add(1, [*range(12), 2])
    bench.add(2, range(50, 60))
    assert bench.go() == [0, 2], "1 would compute what 0 is computing"
    store(bench.mirror, range(12))
    bench.compute(0)
    assert bench.go() == [1]
    assert bench.admission.ahead == 10 + 1, "of 1 there is one token to compute"


def test_the_overdue_goes_first_and_says_so() -> None:
    bench = Bench(Room(blocks=10, chunk_tokens=CHUNK, max_running=8))
    store(bench.mirror, range(12))
    bench.add(0, range(100, 116), now=0.0)
    bench.add(1, range(13), now=1.0, priority=-5)
    late = bench.admission.next(0, now=60.5)
    assert late is not None
    assert (late.work.sequence.request.id, late.priority) == (0, OVERDUE)
    second = bench.admission.next(0, now=60.5)
    assert second is not None and second.priority == -5


def test_who_does_not_fit_waits_here() -> None:
    bench = Bench(Room(blocks=10, chunk_tokens=100, max_running=8))
    bench.add(0, range(20))
    bench.add(1, range(100, 120))
    assert bench.go() == [0], "five blocks each, and one to decode into"
    bench.compute(0)
    assert bench.go(used=6) == []
    assert bench.go(used=4) == [1]


def test_a_shared_prefix_takes_no_room_twice() -> None:
    bench = Bench(Room(blocks=10, chunk_tokens=100, max_running=8))
    bench.add(0, range(24))
    assert bench.go() == [0]
    bench.compute(0)
    store(bench.mirror, range(24))
    bench.add(1, [*range(24), 1, 2])
    bench.add(2, range(100, 126))
    assert bench.go(used=7) == [1]


def test_one_alone_always_goes_in() -> None:
    bench = Bench(Room(blocks=4, chunk_tokens=CHUNK, max_running=8))
    bench.add(0, range(100))
    assert bench.go(used=4) == [0]


def test_who_yields_goes_in_only_alone() -> None:
    bench = Bench()
    bench.add(0, range(100, 104), priority=1)
    bench.add(1, range(200, 204))
    assert bench.go() == [1]
    bench.compute(1)
    assert bench.go() == [0]


def test_loads_return_to_nothing() -> None:
    bench = Bench()
    for id in range(4):
        bench.add(id, range(100 * id, 100 * id + 10))
    admitted = bench.go()
    bench.compute(*admitted)
    for id in range(4):
        assert bench.admission.end(id)
        assert not bench.admission.end(id)
    admission = bench.admission
    assert (admission.waiting, admission.running, admission.ahead) == (0, 0, 0)
    assert (admission.outstanding_tokens, admission.context_tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(-2, 2)), max_size=30))
def test_everybody_goes_in_and_never_too_many(asked: Sequence[tuple[int, int, int]]) -> None:
    room = Room(blocks=20, chunk_tokens=CHUNK, max_running=3)
    bench = Bench(room)
    for id, (family, size, priority) in enumerate(asked):
        bench.add(id, range(family * 1000, family * 1000 + size), now=id, priority=priority)
    done: set[int] = set()
    for _ in range(3 * len(asked) + 1):
        ids = bench.go(now=100.0)
        assert bench.admission.running <= room.max_running
        bench.compute(*ids)
        assert bench.admission.ahead == 0
        for id in ids:
            bench.admission.end(id)
        done.update(ids)
    assert done == set(range(len(asked)))


def test_the_mirror_counts_copies() -> None:
    mirror = Mirror(BLOCK)
    store(mirror, range(8))
    store(mirror, range(8))
    mirror.evict([EvictedRun(keys(range(8))[1:])])
    assert mirror.resident(SPACE, prompt(range(9)), 8) == 8
    mirror.evict([EvictedRun(keys(range(8))[1:])])
    assert mirror.resident(SPACE, prompt(range(9)), 8) == 4
    assert mirror.size == 2 and mirror.evicted == 2
    mirror.store([StoredRun(None, keys(range(20, 24)), tier=Tier.CPU)])
    assert mirror.resident(SPACE, prompt(range(20, 24)), 4) == 0, "not on the device"
    assert mirror.resident(Namespace("m", salt="s"), prompt(range(8)), 8) == 0


@pytest.fixture
def pinned() -> tuple[Mirror, Pins]:
    mirror = Mirror(BLOCK)
    store(mirror, range(8))
    return mirror, Pins(mirror, blocks=48)


def test_pins_are_touched_in_time(pinned: tuple[Mirror, Pins]) -> None:
    mirror, pins = pinned
    assert pins.pin(SPACE, prompt(range(10)), 10.0, now=0.0) == 2
    assert not list(pins.due(used_blocks=0, now=1.0))
    for start in range(100, 160, 4):
        store(mirror, range(start, start + 4))
    assert not list(pins.due(used_blocks=0, now=1.0))
    store(mirror, range(900, 904))
    (pin,) = pins.due(used_blocks=0, now=1.0)
    assert pin.tokens == prompt(range(8))
    assert not list(pins.due(used_blocks=48, now=1.0)), "it is being touched"
    pins.touched(pin)
    assert not list(pins.due(used_blocks=0, now=1.0))
    store(mirror, range(800, 804))
    assert len(list(pins.due(used_blocks=45, now=1.0))) == 1, "little is left to evict"


def test_pins_end(pinned: tuple[Mirror, Pins]) -> None:
    _, pins = pinned
    pins.pin(SPACE, prompt(range(8)), 10.0, now=0.0)
    assert not list(pins.due(used_blocks=48, now=10.0))
    pins.pin(SPACE, prompt(range(8)), 10.0, now=20.0)
    assert pins.unpin(SPACE, prompt(range(8))) == 2
    assert pins.unpin(SPACE, prompt(range(8))) == 0
    assert not list(pins.due(used_blocks=48, now=21.0))
    assert pins.pin(SPACE, prompt(range(500, 510)), 10.0, now=0.0) == 0, "nothing of it is there"


def test_pins_take_a_quarter_at_most(pinned: tuple[Mirror, Pins]) -> None:
    mirror, pins = pinned
    store(mirror, range(100, 148))
    assert pins.pin(SPACE, prompt(range(100, 148)), 9.0, now=0.0) == 48 // SHARE
    assert pins.pin(SPACE, prompt(range(8)), 9.0, now=0.0) is None
    assert pins.pin(SPACE, prompt(range(100, 120)), 9.0, now=0.0) == 5, "of what is pinned already"
    assert pins.pin(SPACE, prompt(range(8)), 9.0, now=9.5) == 2
