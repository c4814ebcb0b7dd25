"""What reuse can gain at most on a shape, from what its parts were measured to take."""

from dataclasses import dataclass

from bench.engine_workloads import Shape


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on the engine under test.

    `decode_*` are of one token of one request, in the batches that the pool has room for.
    """

    prefill_whole: float  # of a request of which nothing is cached
    prefill_shared: float  # of the prefix alone
    prefill_own: float  # of a request whose prefix is cached
    decode_alone: float  # no request shares anything
    decode_shared: float  # all share the prefix


def speedup_limit(shape: Shape, costs: Costs) -> float:
    """Time without reuse over time with perfect reuse, in which each prefix is computed once.

    The first token of a reply comes with the prefill.
    """
    decoded = shape.reply - 1
    requests = shape.groups * shape.requests
    without = requests * (costs.prefill_whole + decoded * costs.decode_alone)
    reused = requests * (costs.prefill_own + decoded * costs.decode_shared)
    return without / (shape.groups * costs.prefill_shared + reused)
