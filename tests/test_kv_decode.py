"""Payloads of KV-cache events in every form that engines have sent them."""

from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbranch.kv_events.decode import Batch, Cleared, Malformed, Removed, Stored, Unknown, decode

encode = msgspec.msgpack.encode


def stored(**fields: Any) -> Stored:
    plain: dict[str, Any] = {
        "hashes": [11, 12],
        "parent": None,
        "token_ids": array("I", [1, 2, 3, 4]).tobytes(),
        "block_size": 2,
        "lora": None,
        "extra": None,
        "salt": None,
        "medium": None,
        "group": None,
        "kind": None,
    }
    return Stored(**plain | fields)


def of_map(**fields: Any) -> Batch:
    """A batch of one BlockStored, as vLLM sends it since 0.24."""
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
    }
    return decode(encode([1.5, [event | fields], 0]))


def of_array(*fields: Any) -> Batch:
    """The same up to 0.23, with what later releases added at the end."""
    event = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, *fields]
    return decode(encode([1.5, [event]]))


def test_a_map() -> None:
    assert of_map() == Batch(0, [stored()])
    told = of_map(
        medium="GPU",
        lora_id=3,
        lora_name="poet",
        extra_keys=[["poet", ["image", 0], "salt", b"digest"], None],
        group_idx=1,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
        locality="LOCAL",
        made_up_later={"a": [1]},
    )
    extra = [["poet", ["image", 0], "salt", b"digest"], None]
    event = stored(medium="GPU", lora="poet", extra=extra, group=1, kind="full_attention")
    assert told == Batch(0, [event])


def test_arrays_of_old_releases() -> None:
    assert of_array() == Batch(None, [stored()])  # SGLang leaves its defaults out
    assert of_array(None) == Batch(None, [stored()])  # vLLM 0.8
    assert of_array(7) == Batch(None, [stored(lora="7")])
    assert of_array(7, "GPU") == Batch(None, [stored(lora="7", medium="GPU")])
    assert of_array(7, "GPU", "poet") == Batch(None, [stored(lora="poet", medium="GPU")])
    full = of_array(None, "GPU", None, [["salt"], None], 2, "mamba", 512, "made up later")
    event = stored(medium="GPU", extra=[["salt"], None], group=2, kind="mamba")
    assert full == Batch(None, [event])


def test_removals_and_clears_in_both_forms() -> None:
    maps = [
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU", "group_idx": 1},
        {"type": "BlockRemoved", "block_hashes": [11]},
        {"type": "AllBlocksCleared"},
    ]
    arrays = [
        ["BlockRemoved", [11], "CPU", 1, "made up later"],
        ["BlockRemoved", [11]],
        ["AllBlocksCleared"],
    ]
    events = [Removed([11], "CPU", 1), Removed([11], None, None), Cleared()]
    assert decode(encode([1.5, maps, 3])) == Batch(3, events)
    assert decode(encode([1.5, arrays, 3])) == Batch(3, events)


def test_a_batch_as_a_map() -> None:
    batch = {"ts": 1.5, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 2}
    assert decode(encode(batch)) == Batch(2, [Cleared()])


def test_signed_and_unsigned_hashes_are_one_name() -> None:
    signed = of_map(block_hashes=[-1, -(2**63)], parent_block_hash=-2)
    unsigned = of_map(block_hashes=[2**64 - 1, 2**63], parent_block_hash=2**64 - 2)
    assert signed == unsigned
    assert signed == Batch(0, [stored(hashes=[2**64 - 1, 2**63], parent=2**64 - 2)])
    removed = decode(encode([1.5, [{"type": "BlockRemoved", "block_hashes": [-1]}]]))
    assert removed == Batch(None, [Removed([2**64 - 1], None, None)])


def test_whole_hashes() -> None:
    event = stored(hashes=[b"\xff" * 32, b"b" * 32], parent=b"a" * 32)
    told = of_map(block_hashes=[b"\xff" * 32, b"b" * 32], parent_block_hash=b"a" * 32)
    assert told == Batch(0, [event])


def test_salts_of_sglang() -> None:
    assert of_map(cache_salt="tenant", session_id="s") == Batch(0, [stored(salt="tenant")])


def test_pairs_of_tokens_of_sglang_with_eagle() -> None:
    assert of_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]) == Batch(0, [stored()])


def test_an_unknown_event_spoils_nothing() -> None:
    events = [{"type": "BlockPinned", "block": 5}, ["BlockMoved", 1], {"type": "AllBlocksCleared"}]
    told = decode(encode([1.5, events]))
    assert told == Batch(None, [Unknown("BlockPinned"), Unknown("BlockMoved"), Cleared()])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(5),
        encode("BlockStored"),
        encode([1.5]),
        b"\x91" * 5000,
        encode([1.5, 5]),
        encode([1.5, "events"]),
        encode([1.5, [5]]),
        encode([1.5, [[]]]),
        encode([1.5, [{}]]),
        encode([1.5, [{"type": "BlockStored"}]]),
        encode([1.5, [{"type": "BlockRemoved", "block_hashes": 11}]]),
        encode([1.5, [{"type": "BlockRemoved", "block_hashes": ["abcd"]}]]),
        encode([1.5, [["BlockStored", [11], None, [-1], 1]]]),
        encode([1.5, [["BlockStored", [11], None, [2**32], 1]]]),
        encode([1.5, [["BlockStored", [11], None, ["a"], 1]]]),
        encode([1.5, [["BlockStored", [11], None, [[]], 1]]]),
        encode([1.5, [["BlockStored", [11], None, [1], 1, None, 5]]]),
    ],
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(Malformed, match="not a batch of KV-cache events"):
        decode(payload)


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_read_or_malformed(payload: bytes) -> None:
    with suppress(Malformed):
        assert isinstance(decode(payload), Batch)


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
)
def test_fields_of_any_kind_are_read_or_malformed(value: Any, name: str) -> None:
    for event in (
        [name, value],
        [name, [1], value, [2], 1, value],
        {"type": name, "medium": value},
    ):
        for batch in ([1.5, [event]], [1.5, [event], value], {"ts": value, "events": [event]}):
            with suppress(Malformed):
                assert len(decode(encode(batch)).events) == 1
