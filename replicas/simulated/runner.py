"""A model runner that computes nothing: it takes as long as the profile says, and says a text."""

import time
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from replicas.engine import TokenLogprobs
from replicas.radix.sequence import Chunk, Sampled
from replicas.radix.sequence import Sequence as Generation
from replicas.simulated.profile import Profile

TEXT = (
    " A radix tree keeps what many words begin with once. Each prompt is a path in it, from the"
    " root to a leaf, and two prompts that begin alike share the first part of their paths. What"
    " was computed along a path stays until there is no room for it, and whoever comes down the"
    " same way finds it there. The branch that was walked last is the warmest one; the one that"
    " nobody took for long is cut first, from its tip back to the nearest fork."
)
SHORTEST, LONGEST = 24, 256  # tokens of an answer that nothing else bounds


class SimulatedRunner:
    """Implements `replicas.radix.engine.Runner`. `text` are the tokens that answers are made of.

    An answer depends on its prompt alone: where in the text it begins, and when it ends.
    """

    def __init__(self, profile: Profile, text: Sequence[int], eos: int) -> None:
        self._profile = profile
        self._text = text
        self._eos = eos
        self._ended = 0.0  # of the last step
        self._seeds: dict[Generation, int] = {}

    def run(self, chunks: list[Chunk]) -> list[Sampled | None]:
        """Sleeps as long as the step takes. What the engine itself did since the last step, which a
        GPU would have overlapped, is taken off."""
        now, seconds = time.monotonic(), self._profile.seconds(chunks)
        began = self._ended if now - self._ended < self._profile.step_s else now
        self._ended = max(now, began + seconds)
        time.sleep(self._ended - now)
        return [self._sample(chunk.sequence) if chunk.samples else None for chunk in chunks]

    def forget(self, sequence: Generation) -> None:
        self._seeds.pop(sequence, None)

    def _sample(self, sequence: Generation) -> Sampled:
        seed = self._seeds.get(sequence)
        if seed is None:
            seed = self._seeds[sequence] = xxh3_64_intdigest(sequence.request.prompt)
        said, sampling = sequence.generated, sequence.request.sampling
        length = max(sampling.min_tokens, SHORTEST + seed % (LONGEST - SHORTEST))
        over = said >= length and not sampling.ignore_eos
        token = self._eos if over else self._text[(seed + said) % len(self._text)]
        if sampling.logprobs is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(token, 0.0, ((token, 0.0),)))
