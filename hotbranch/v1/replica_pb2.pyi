from hotbranch.v1 import cache_pb2 as _cache_pb2
from hotbranch.v1 import serve_pb2 as _serve_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_SERVING: _ClassVar[State]
    STATE_LOADING: _ClassVar[State]
    STATE_ASLEEP: _ClassVar[State]
    STATE_MODEL_NOT_FOUND: _ClassVar[State]
    STATE_OUT_OF_MEMORY: _ClassVar[State]
    STATE_START_FAILED: _ClassVar[State]
    STATE_DEAD: _ClassVar[State]
    STATE_HUNG: _ClassVar[State]
STATE_SERVING: State
STATE_LOADING: State
STATE_ASLEEP: State
STATE_MODEL_NOT_FOUND: State
STATE_OUT_OF_MEMORY: State
STATE_START_FAILED: State
STATE_DEAD: State
STATE_HUNG: State

class Namespace(_message.Message):
    __slots__ = ("model", "adapter", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    salt: str
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("replica_id", "epoch", "model", "tokenizer_fingerprint", "block_size", "capacity_blocks", "max_context", "vocab_size", "engine", "ranks", "metrics_address", "version", "draining", "key_check", "chunk_tokens", "state", "problem", "adapters", "structures", "parses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KEY_CHECK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURES_FIELD_NUMBER: _ClassVar[int]
    PARSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    epoch: int
    model: str
    tokenizer_fingerprint: str
    block_size: int
    capacity_blocks: int
    max_context: int
    vocab_size: int
    engine: str
    ranks: int
    metrics_address: str
    version: str
    draining: bool
    key_check: int
    chunk_tokens: int
    state: State
    problem: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    structures: bool
    parses: bool
    def __init__(self, replica_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., capacity_blocks: _Optional[int] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., engine: _Optional[str] = ..., ranks: _Optional[int] = ..., metrics_address: _Optional[str] = ..., version: _Optional[str] = ..., draining: _Optional[bool] = ..., key_check: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., state: _Optional[_Union[State, str]] = ..., problem: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., structures: _Optional[bool] = ..., parses: _Optional[bool] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "token_ids", "ttl_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    token_ids: bytes
    ttl_s: float
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pinned_blocks",)
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pinned_blocks: int
    def __init__(self, pinned_blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("namespace", "token_ids")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    token_ids: bytes
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned_blocks",)
    UNPINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    unpinned_blocks: int
    def __init__(self, unpinned_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("unfinished",)
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    unfinished: int
    def __init__(self, unfinished: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("discard_weights",)
    DISCARD_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    discard_weights: bool
    def __init__(self, discard_weights: _Optional[bool] = ...) -> None: ...

class SleepReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
