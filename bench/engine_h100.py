"""What one H100 that serves Llama-3.1-8B in bfloat16 would do: the simulator's timing model.

It was fitted to published measurements of vLLM and SGLang, and is within a fifth of them.
"""

from replicas.simulated.profile import DEFAULT, Profile

H100 = Profile.load(DEFAULT)


def step_seconds(prefill: int = 0, decoding: int = 0, context: int = 0) -> float:
    """A step that prefills one cold chunk and decodes so many sequences, each of that context."""
    return H100.step(prefill, prefill * prefill / 2, decoding, decoding * context)


def prefill_rate(tokens: int) -> float:
    """Tokens a second of one prompt in one step."""
    return tokens / step_seconds(prefill=tokens)


def decode_rate(batch: int, context: int) -> float:
    """Tokens a second of all sequences together."""
    return batch / step_seconds(decoding=batch, context=context)
