"""What a replica knows of one rank of vLLM, from its events and its steps."""

import struct
from functools import partial

import pytest

from hotbranch.keys import block_keys, root
from hotbranch.kv_events.decode import Batch, Cleared, Removed, Stored
from replicas.engine import EvictedRun, Namespace, Request, Sampling, StoredRun
from replicas.vllm.admission import Room
from replicas.vllm.rank import Rank, Stepped, total

BLOCK = 4
IDS = struct.pack("<8I", *range(8))
KEYS = block_keys(IDS, BLOCK, root("m"))


@pytest.fixture
def rank() -> Rank:
    room = Room(blocks=100, chunk_tokens=64, max_running=4)
    return Rank(3, "m", BLOCK, room, "longest_prefix", 60.0)


def stored(*names: int, ids: bytes = IDS) -> Stored:
    return Stored(
        hashes=names,
        parent=None,
        token_ids=ids,
        block_size=BLOCK,
        lora=None,
        extra=None,
        salt=None,
        medium="GPU",
        group=None,
        kind=None,
    )


def removed(*names: int) -> Removed:
    return Removed(hashes=names, medium="GPU", group=None)


def test_events_become_runs_of_the_rank(rank: Rank) -> None:
    rank.received(Batch(None, [stored(7, 8)]))
    changes = rank.drain()
    assert changes.stored == [StoredRun(None, KEYS, rank=3)]
    assert not (changes.wiped or changes.evicted)
    rank.received(Batch(None, [removed(8)]))
    assert rank.drain().evicted == [EvictedRun(KEYS[1:], rank=3)]
    assert rank.snapshot() == [StoredRun(None, KEYS[:1], rank=3)]
    assert rank.mirror.resident(Namespace("m"), IDS, 8) == BLOCK
    assert rank.load().cached_blocks == 1
    assert rank.load().evicted_blocks == 1


def test_what_a_prompt_computed_counts_before_its_events_come(rank: Rank) -> None:
    space, step = Namespace("m"), Stepped(3, 0.0, 8, 0.1)
    resident = partial(rank.mirror.resident, space, IDS, 8)
    rank.admission.add(Request(1, space, IDS, Sampling(max_tokens=4)), 0.0)
    assert rank.admission.next(0, 0.0)
    assert resident() == 0
    rank.admission.generated(1, 1)
    rank.stepped(step)
    assert resident() == 2 * BLOCK
    assert rank.load().cached_blocks == 0 and rank.snapshot() == []
    rank.received(Batch(None, [stored(7, 8)]))
    assert resident() == 2 * BLOCK
    rank.received(Batch(None, [removed(8)]))
    assert resident() == BLOCK, "what was told counts no more by itself"
    rank.received(Batch(None, [removed(7)]))
    assert resident() == 0


def test_what_is_never_told_is_not_believed_for_long(rank: Rank) -> None:
    space, step = Namespace("m"), Stepped(3, 0.0, 8, 0.1)
    rank.mirror.computed(space, IDS)
    rank.stepped(step)
    assert rank.mirror.resident(space, IDS, 8) == 2 * BLOCK
    rank.stepped(step)
    assert rank.mirror.resident(space, IDS, 8) == 0
    rank.mirror.computed(space, IDS)
    rank.reset()
    assert rank.mirror.resident(space, IDS, 8) == 0


def test_a_clear_of_vllms_own_wipes(rank: Rank) -> None:
    rank.received(Batch(None, [stored(7, 8)]))
    rank.received(Batch(None, [Cleared(), stored(9, ids=IDS[:16])]))
    changes = rank.drain()
    assert changes.wiped
    assert changes.stored == [StoredRun(None, KEYS[:1], rank=3)], "what came before is moot"
    assert rank.load().cached_blocks == 1


def test_events_from_before_a_reset_count_no_more(rank: Rank) -> None:
    """vLLM announces a reset only with its next step; what comes before tells of the old cache."""
    rank.received(Batch(None, [stored(7, 8)]))
    rank.drain()
    rank.reset()
    assert rank.drain().wiped
    assert rank.snapshot() == []
    rank.received(Batch(None, [stored(9, ids=IDS[:16])]))
    assert rank.snapshot() == [] and not rank.drain().stored
    rank.received(Batch(None, [Cleared(), stored(7, 8)]))
    changes = rank.drain()
    assert not changes.wiped, "it was said already"
    assert changes.stored == rank.snapshot() == [StoredRun(None, KEYS, rank=3)]


def test_a_reset_that_vllm_refuses_is_taken_back(rank: Rank) -> None:
    rank.received(Batch(None, [stored(7, 8)]))
    rank.reset()
    rank.drain()
    rank.reset_refused()
    assert rank.drain().wiped, "what is held is told anew"
    assert rank.snapshot() == [StoredRun(None, KEYS, rank=3)]
    assert rank.mirror.resident(Namespace("m"), IDS, 8) == 2 * BLOCK
    rank.received(Batch(None, [removed(8)]))
    assert rank.drain().evicted == [EvictedRun(KEYS[1:], rank=3)]


def test_a_reset_drops_pins(rank: Rank) -> None:
    rank.received(Batch(None, [stored(7, 8)]))
    assert rank.pins.pin(Namespace("m"), IDS, 60.0, now=0.0) == 2
    rank.reset()
    assert rank.pins.unpin(Namespace("m"), IDS) == 0


def test_load_is_of_the_last_step_and_of_what_is_here(rank: Rank) -> None:
    rank.admission.add(Request(1, Namespace("m"), IDS, Sampling(9)), 0.0)
    assert rank.admission.next(0, 0.0) is not None
    rank.stepped(Stepped(3, usage=0.25, prefill=5, seconds=0.5))
    load = rank.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (1, 0, 3)
    assert load.used_blocks == 25
    rank.admission.generated(1, 1)
    assert (rank.load().outstanding_tokens, rank.load().batch_context_tokens) == (0, 9)
    rank.stepped(Stepped(3, usage=0.25, prefill=0, seconds=0.125))
    assert rank.load().step_s == 0.125
    rank.admission.end(1)
    assert rank.load().used_blocks == 0, "nothing runs that could hold any"
    both = total([load, rank.load()])
    assert (both.running, both.total_blocks) == (1, 200)
    assert both.step_s == 0.125
