from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_GPU: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class Group(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_ATTENTION: _ClassVar[Group]
    GROUP_WINDOW: _ClassVar[Group]
    GROUP_STATE: _ClassVar[Group]
TIER_GPU: Tier
TIER_CPU: Tier
TIER_DISK: Tier
GROUP_ATTENTION: Group
GROUP_WINDOW: Group
GROUP_STATE: Group

class WatchRequest(_message.Message):
    __slots__ = ("load_interval_s",)
    LOAD_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    load_interval_s: float
    def __init__(self, load_interval_s: _Optional[float] = ...) -> None: ...

class CacheUpdate(_message.Message):
    __slots__ = ("epoch", "snapshot", "delta", "load")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    snapshot: Snapshot
    delta: CacheDelta
    load: Load
    def __init__(self, epoch: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., delta: _Optional[_Union[CacheDelta, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("parent", "keys", "rank", "tier", "group")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    parent: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    tier: Tier
    group: Group
    def __init__(self, parent: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., group: _Optional[_Union[Group, str]] = ...) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("keys", "rank", "tier", "group")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    tier: Tier
    group: Group
    def __init__(self, keys: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., group: _Optional[_Union[Group, str]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("runs", "last", "sequence")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    last: bool
    sequence: int
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., last: _Optional[bool] = ..., sequence: _Optional[int] = ...) -> None: ...

class CacheDelta(_message.Message):
    __slots__ = ("sequence", "cleared", "stored", "evicted")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    cleared: bool
    stored: _containers.RepeatedCompositeFieldContainer[Run]
    evicted: _containers.RepeatedCompositeFieldContainer[Evicted]
    def __init__(self, sequence: _Optional[int] = ..., cleared: _Optional[bool] = ..., stored: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., evicted: _Optional[_Iterable[_Union[Evicted, _Mapping]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "outstanding_tokens", "used_blocks", "cached_blocks", "total_blocks", "step_s", "prefill_s_per_token", "evicted_blocks", "batch_context_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    outstanding_tokens: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    step_s: float
    prefill_s_per_token: float
    evicted_blocks: int
    batch_context_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_s_per_token: _Optional[float] = ..., evicted_blocks: _Optional[int] = ..., batch_context_tokens: _Optional[int] = ...) -> None: ...
