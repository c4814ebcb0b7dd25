"""One request while the engine works on it, and the unit of work that a runner gets."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from replicas.engine import Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens and where their KV lies.

    `tokens` is the prompt and what was generated. The KV of tokens[:computed] is in the pool, token
    i in slot `blocks[i // block_size] * block_size + i % block_size`.
    """

    request: Request
    tokens: "array[int]"  # typecode "I": uint32
    prompt_len: int
    arrival: float  # seconds, the engine's clock
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int | None = None  # of the first admission; a preemption does not change it

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens[start:end] of a sequence; sample the next token when `end` is its length."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


def prefill_tokens(chunks: Iterable[Chunk]) -> int:
    """Tokens of the chunks that do more than decode."""
    return sum(size for chunk in chunks if (size := chunk.end - chunk.start) > 1)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, with its log probabilities where the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None
