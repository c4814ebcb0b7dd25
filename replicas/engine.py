"""The interface between the gRPC service and an engine, as plain data.

An engine runs its steps on a thread of its own. The service calls it from the event loop; no call
blocks, all take effect at the next step boundary. The engine answers through one callback, once per
step, in order: what the step produced for the requests, and what it changed in the cache.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Protocol

from hotbranch.tier import Tier


class Finish(IntEnum):
    """Why a request ended; the values of the contract's FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """Equal tokens under different namespaces never share blocks."""

    model: str
    adapter: str = ""
    salt: str = ""


class Form(Enum):
    """How a structure is told; the names of the contract's Structure.form."""

    JSON_SCHEMA = auto()
    JSON_OBJECT = auto()
    REGEX = auto()
    CHOICES = auto()
    GRAMMAR = auto()
    STRUCTURAL_TAG = auto()


@dataclass(frozen=True, slots=True)
class Structure:
    """What a reply must look like: one text, or several where it is one of CHOICES."""

    form: Form
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 keeps all."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    structure: Structure | None = None
    min_tokens: int = 0
    include_stop: bool = False  # the stop string, or what the stop id spells, stays in the text
    special_tokens: bool = False  # shown in the text


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `id` is unique within the engine; `prompt` is uint32 LE bytes.

    `chat` is JSON for a parser of the reply, as the contract's Submit has it.
    """

    id: int
    namespace: Namespace
    prompt: bytes
    sampling: Sampling
    priority: int = 0
    request_id: str = ""
    rank: int = 0
    chat: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a chosen token and of the most likely ones, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of a call that a parser found: the name comes once, the arguments in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Output:
    """What one step adds to one request. `cached_tokens` comes with the first output only.

    `refused` with ERROR: the request can never run as it is.
    """

    id: int
    tokens: list[int]
    text: str
    finish: Finish | None = None
    cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: str = ""
    error: str = ""
    refused: bool = False
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Blocks now held, each the child of the one before it; `parent` is a key, None at a root."""

    parent: int | None
    keys: Sequence[int]
    rank: int = 0
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class EvictedRun:
    """Blocks no longer held."""

    keys: Sequence[int]
    rank: int = 0
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is; units as in the contract's Load."""

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


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. Cache changes apply in order: wiped, stored, evicted."""

    number: int
    outputs: Sequence[Output]
    stored: Sequence[StoredRun]
    evicted: Sequence[EvictedRun]
    load: Load
    wiped: bool = False  # all that was held before is gone


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the engine lives. Sizes in tokens unless named otherwise."""

    engine: str
    block_size: int
    capacity_blocks: int
    max_context: int
    vocab_size: int
    ranks: int = 1
    chunk_tokens: int = 0  # prefilled in one step, at most; 0 when unknown
    adapters: Sequence[str] = ()  # LoRA adapters, by name
    structures: bool = False  # whether it holds replies to a Structure
    parses: bool = False  # whether it finds tool calls or reasoning in replies


class Fault(Enum):
    """Why no engine could be built."""

    MODEL_NOT_FOUND = auto()
    OUT_OF_MEMORY = auto()
    BAD_SETTINGS = auto()  # they cannot work with this model or on this machine
    START_FAILED = auto()  # for a reason that nobody foresaw


class StartError(Exception):
    """No engine could be built; the message is one line for the user."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Engine(Protocol):
    """Runs requests and reports its cache.

    Invariants: every submitted request gets exactly one output with `finish` set; a cancelled one
    by the end of the next step. `stored` names a block after its parent, `evicted` names it before
    its parent. The sum of all steps' changes since a snapshot, applied to it, is the next snapshot.
    """

    facts: Facts

    def start(self, emit: Callable[[Step], None]) -> None:
        """Start the engine thread; it calls `emit` after each step that changed anything.

        Open requests without a step for `step_timeout_s` are an engine that hangs: one that only
        computes emits, too.
        """

    def stop(self) -> None:
        """End the thread after the current step. Unfinished requests end with CANCELLED."""

    def submit(self, request: Request) -> None:
        """Queue a request. A request that can never run ends at once with ERROR."""

    def cancel(self, id: int) -> None:
        """End a request; unknown and finished ids are ignored."""

    def snapshot(self, reply: Callable[[Sequence[StoredRun]], None]) -> None:
        """Call `reply` on the engine thread with all that is cached, parents before children."""

    def pin(self, namespace: Namespace, prompt: bytes, ttl_s: float) -> Future[int | None]:
        """Pin the resident whole blocks of `prompt`; blocks pinned, or None when over the cap."""

    def unpin(self, namespace: Namespace, prompt: bytes) -> Future[int]:
        """Take a pin back; blocks that were pinned by it."""

    def flush(self) -> Future[None]:
        """Evict every block that no request uses; done once the evicting step was emitted."""

    def sleep(self, discard_weights: bool) -> Future[None] | None:
        """Drop the cache and give the device's memory back; None where the engine cannot.

        Nothing is submitted before `wake`. Done once the step that says `wiped` was emitted.
        """

    def wake(self) -> Future[None] | None:
        """Take the memory again; None where the engine cannot sleep.

        One that is awake stays so. One that fails to wake sleeps on, and may be asked again.
        """

    def load(self) -> Load:
        """The load as of the last step, from any thread."""

    def healthy(self) -> str:
        """Empty while it lives, else one line on why it is dead: it ended, or every step fails.

        That no step ends need not be told here.
        """
