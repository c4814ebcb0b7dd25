"""The timing model of one H100 that serves Llama-3.1-8B in bfloat16.

It was fitted to published measurements of vLLM and SGLang, and is within a fifth of them.
"""


def step_seconds(prefill: int = 0, decoding: int = 0, context: int = 0) -> float:
    """A step that prefills one cold chunk and decodes so many sequences, each of that context.

    What a step takes however little it computes; each token's products; the reading of the
    context's KV; attention within the chunk.
    """
    products = 0.020 * (prefill + decoding)
    reading = 4.5e-5 * decoding * context
    attention = 1.05e-6 * prefill * prefill / 2
    return (6.6 + products + reading + attention) / 1000


def prefill_rate(tokens: int) -> float:
    """Tokens a second of one prompt in one step."""
    return tokens / step_seconds(prefill=tokens)


def decode_rate(batch: int, context: int) -> float:
    """Tokens a second of all sequences together."""
    return batch / step_seconds(decoding=batch, context=context)
