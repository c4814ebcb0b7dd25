"""What TRACE names: a file, whose format is found out, or load that is made up."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from bench.fleet import texts
from bench.fleet.caches import ideal_hit
from bench.fleet.logs import openai_log
from bench.fleet.shapes import SHAPES, shaped
from bench.fleet.traces import MOONCAKE_BLOCK, Arrival, TraceError, faster, mooncake, records
from hotbranch.settings import SimulateSettings
from replicas.simulated.virtual import TOKEN
from router.prompt.render import Renderer

BLOCK = 16
SHAPED = 4000  # requests of a shape, unless told otherwise
TEXTS: Mapping[str, Callable[[Path], Iterator[Arrival]]] = {
    "tau-bench": texts.tau_bench,
    "bfcl-live": texts.bfcl_live,
    "bfcl-turns": texts.bfcl_multi_turn,
}
KINDS = (
    f"shape:NAME ({', '.join(SHAPES)}), a file, or {', '.join(f'{name}:PATH' for name in TEXTS)}"
)


@dataclass(frozen=True, slots=True)
class Load:
    """`play` starts from the beginning with each call. `ideal` are the tokens that a cache without
    bound would have of each prompt."""

    name: str
    block_size: int
    play: Callable[[], Iterator[Arrival]]
    ideal: list[int]


def load(settings: SimulateSettings, renderer: Callable[[], Renderer], kv_tokens: int) -> Load:
    """Reads it once from end to end, so that what is wrong with it shows at once. Raises
    TraceError. `renderer` makes that of the model, if it is needed.
    """
    play, block_size = _source(settings, renderer)
    block_size = settings.block_size or block_size

    def limited() -> Iterator[Arrival]:
        return islice(faster(play(), settings.speed), settings.requests or None)

    known: set[int] = set()
    ideal = []
    for number, arrival in enumerate(limited(), 1):
        if arrival.tokens + block_size > kv_tokens:
            short = f"{arrival.tokens} tokens, the KV pool of a replica has {kv_tokens}"
            raise TraceError(f"{settings.trace}: request {number} has a prompt of {short}")
        reply = TOKEN.token.to_bytes(4, "little") * arrival.output
        ideal.append(ideal_hit(arrival.prompt, block_size, known, reply))
    if not ideal:
        raise TraceError(f"{settings.trace}: no requests")
    return Load(Path(settings.trace).stem, block_size, limited, ideal)


def no_renderer() -> Renderer:
    """For loads that are known to need no model."""
    raise TraceError("an OpenAI log is not played here")


def _source(
    settings: SimulateSettings, renderer: Callable[[], Renderer]
) -> tuple[Callable[[], Iterator[Arrival]], int]:
    """What plays it, and the size of blocks that suits it."""
    kind, colon, name = settings.trace.partition(":")
    if not settings.trace:
        raise TraceError(f"what to simulate? {KINDS}")
    if colon and kind == "shape":
        if name not in SHAPES:
            raise TraceError(f"no shape {name!r}: {', '.join(SHAPES)}")
        shape = SHAPES[name]
        rate = settings.rate or shape.rate * settings.replicas
        requests = settings.requests or SHAPED
        return (
            partial(shaped, shape, requests, rate, settings.shape_tenants, settings.seed),
            BLOCK,
        )
    if colon and kind in TEXTS:
        return partial(TEXTS[kind], Path(name)), BLOCK
    path = Path(settings.trace)
    first = next((record for _, record in records(path)), None)
    if first is None:
        raise TraceError(f"{path}: no requests")
    if "hash_ids" in first:
        return partial(mooncake, path), MOONCAKE_BLOCK
    if "messages" in first:
        arrivals = list(openai_log(path, renderer()))
        return lambda: iter(arrivals), BLOCK
    raise TraceError(f"{path}: neither hash_ids (Mooncake) nor messages (OpenAI) in its first line")
