"""Payloads of KV-cache events, as vLLM and SGLang publish them, to plain data.

A batch is the msgpack of `[timestamp, events, data-parallel rank]`. An event is a map with its
name under "type" (vLLM since 0.24, SGLang), or an array: its name, then the fields in order (vLLM
up to 0.23, older SGLang). Both are read alike; what is not known here is passed over, and fields
may be missing from the end on. For a while vLLM's main branch sent batches as maps, too.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

MASK = (1 << 64) - 1

Id = int | bytes
"""An engine's hash of a block, unsigned 64 bits or whole: a name, whose value means nothing."""


class Malformed(ValueError):
    """Bytes that are no batch of events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were stored, each the child of the one before it."""

    hashes: Sequence[Id]
    parent: Id | None  # the block before the first; none at the root
    token_ids: bytes  # little-endian uint32; empty where an engine does not tell them
    block_size: int  # tokens; 0 where an engine does not tell it
    lora: str | None  # the adapter's name, or its number where an engine tells no name
    extra: Sequence[Sequence[Any] | None] | None  # vLLM: what else is hashed, block by block
    salt: str | None  # SGLang
    medium: str | None
    group: int | None
    kind: str | None  # of the group's attention


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each of these blocks is gone."""

    hashes: Sequence[Id]
    medium: str | None
    group: int | None


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything is gone."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event of a kind that is not known here."""

    name: str


Event = Stored | Removed | Cleared | Unknown


@dataclass(frozen=True, slots=True)
class Batch:
    rank: int | None  # data-parallel, as the engine says; the connection says it better
    events: Sequence[Event]


class _Batch(msgspec.Struct):
    """As it is sent. An array has these fields, and those of the events, in this order."""

    ts: float
    events: list[list[Any] | dict[str, Any]]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct):
    block_hashes: list[Id]
    parent_block_hash: Id | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # SGLang: in maps only


class _Removed(msgspec.Struct):
    block_hashes: list[Id]
    medium: str | None = None
    group_idx: int | None = None


_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_decoder = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> Batch:
    """The events of one message, in order. Raises Malformed."""
    try:
        batch = _read(_decoder.decode(payload), _Batch)
        return Batch(batch.data_parallel_rank, [_event(event) for event in batch.events])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"not a batch of KV-cache events: {error!r}") from error


def _event(event: list[Any] | dict[str, Any]) -> Event:
    fields = event if isinstance(event, dict) else event[1:]
    match event["type"] if isinstance(event, dict) else event[0]:
        case "BlockStored":
            return _stored(_read(fields, _Stored))
        case "BlockRemoved":
            removed = _read(fields, _Removed)
            return Removed(_ids(removed.block_hashes), removed.medium, removed.group_idx)
        case "AllBlocksCleared":
            return Cleared()
        case name:
            return Unknown(str(name))


def _read(fields: list[Any] | dict[str, Any], kind: type[_Struct]) -> _Struct:
    if isinstance(fields, list):
        names = (name for name in kind.__struct_fields__ if name != "cache_salt")
        return _read(dict(zip(names, fields, strict=False)), kind)
    return msgspec.convert(fields, kind, builtin_types=(bytes,))  # no bytes out of base64


def _stored(event: _Stored) -> Stored:
    lora = event.lora_name or event.lora_id
    return Stored(
        hashes=_ids(event.block_hashes),
        parent=None if event.parent_block_hash is None else _ids([event.parent_block_hash])[0],
        token_ids=_token_bytes(event.token_ids),
        block_size=event.block_size,
        lora=None if lora is None else str(lora),
        extra=event.extra_keys,
        salt=event.cache_salt,
        medium=event.medium,
        group=event.group_idx,
        kind=event.kv_cache_spec_kind,
    )


def _ids(hashes: list[Id]) -> list[Id]:
    """SGLang signs its 64 bits, vLLM does not."""
    return [value & MASK if isinstance(value, int) else value for value in hashes]


def _token_bytes(token_ids: list[Any]) -> bytes:
    """SGLang with EAGLE sends each token with the one after it."""
    if token_ids and isinstance(token_ids[0], list):
        token_ids = [pair[0] for pair in token_ids]
    try:
        return array("I", token_ids).tobytes()
    except OverflowError as error:
        raise ValueError("a token id beyond 32 bits") from error
