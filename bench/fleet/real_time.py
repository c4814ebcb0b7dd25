"""The router as it runs, beside virtual time: `python -m bench fleet --real-time`.

Simulated replicas run as processes of their own; the router's links, index and dispatcher run here
and talk to them over gRPC. The same requests are then played in virtual time, some times more with
arrivals that are a little later: what so small a cause moves, no model can foretell. `--dilate`
makes each second of the timing model so many times longer in both, where this machine is too small
for all replicas at full speed. The last line is JSON.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import yaml

from bench.fleet import live
from bench.fleet.live import Answer
from bench.fleet.load import load, no_renderer
from bench.fleet.processes import NotStarted, Replicas, replica_processes
from bench.fleet.report import percentile
from bench.fleet.simulation import Fleet, Simulation
from bench.fleet.traces import Arrival, TraceError
from hotbranch.embedded import ModelError, resolve_model
from hotbranch.fingerprint import fingerprint
from hotbranch.settings import SimulateSettings
from replicas.radix.config import read_config
from replicas.simulated.profile import DEFAULT, Profile, ProfileError
from router.schedule.policies import ADMISSION, policy
from router.schedule.scheduler import Rules

OURS = "hotbranch"
MODEL = "simulated"  # as in virtual time, so that block keys are the same
CONVERSATION = "mooncake-fast25/conversation_trace.jsonl"
FIRST_TOKEN = 2  # of prompts; a virtual replica says 1, which so no prompt continues
HIT_POINTS, TTFT_SHARE = 2.0, 0.1  # what may differ
PLAYS = 5  # in virtual time, with arrivals that are
SHIFT_S = 0.002  # so much later, at most


@dataclass(frozen=True, slots=True)
class Played:
    """A load that was played: tokens of its prompts, in all and found in caches; seconds to the
    first token, sorted, without what failed; placements by reason."""

    tokens: int
    cached: int
    ttft: Sequence[float]
    reasons: Counter[str]

    @classmethod
    def of(cls, answers: Sequence[Answer], reasons: Counter[str]) -> "Played":
        tokens, cached = (sum(one.tokens for one in answers), sum(one.cached for one in answers))
        return cls(tokens, cached, sorted(one.ttft for one in answers), reasons)

    @property
    def hit_rate(self) -> float:
        """In percent."""
        return 100 * self.cached / (self.tokens or 1)

    @property
    def mean(self) -> float:
        return sum(self.ttft) / (len(self.ttft) or 1)


def main(argv: Sequence[str]) -> int:
    """Exit status 1 where the two disagree, 2 and one line for what cannot be played."""
    trace, speed = _default()
    parser = argparse.ArgumentParser(prog="python -m bench fleet --real-time", description=__doc__)
    parser.add_argument("--trace", default=trace, help="as `hotbranch simulate` takes it")
    parser.add_argument("--profile", default=DEFAULT, help="timing model")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--speed", type=float, default=speed, help="times faster than recorded")
    parser.add_argument("--dilate", type=float, default=1.0, help="times slower, everything")
    asked = parser.parse_args(argv)
    settings = SimulateSettings(
        trace=asked.trace,
        replicas=asked.replicas,
        requests=asked.requests,
        speed=asked.speed / asked.dilate,
    )
    try:
        result = compare(settings, dilated(Profile.load(asked.profile), asked.dilate))
    except (TraceError, ProfileError, ModelError, NotStarted) as error:
        print(f"python -m bench fleet --real-time: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    missed = list(disagreements(result))
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    given = {"trace": Path(asked.trace).stem, "speed": asked.speed, "dilation": asked.dilate}
    print(json.dumps({**given, **result, "missed": missed}))
    return 1 if missed else 0


def _default() -> tuple[str, float]:
    """A trace, and a speed at which it keeps eight replicas fairly busy."""
    path = Path(os.environ.get("TRACES", "")) / CONVERSATION
    return (str(path), 3.0) if path.exists() else ("shape:agents", 0.25)


def dilated(profile: Profile, factor: float) -> Profile:
    """A GPU that is so many times slower. It takes each prompt that fits its pool, as in virtual
    time: a few recorded ones exceed the model's own limit."""
    constants = profile.model_dump()
    seconds = {name: value * factor for name, value in constants.items() if name.endswith("_s")}
    return profile.model_copy(update={**seconds, "max_context": profile.kv_tokens})


def compare(settings: SimulateSettings, profile: Profile) -> dict[str, Any]:
    """Play a load both ways. Raises TraceError, ModelError and NotStarted."""
    _, directory = resolve_model(settings.model, settings.cache_dir)
    played = load(settings, no_renderer, profile.kv_tokens)
    vocabulary = read_config(directory, 0).vocab_size
    arrivals = [spoken(arrival, vocabulary) for arrival in played.play()]
    rules = Rules(window=settings.window, starvation_s=settings.starvation_s)
    with _interruptible(), _replicas(settings, profile, played.block_size) as replicas:
        lived = uvloop.run(live.play(replicas, MODEL, fingerprint(directory), rules, arrivals))
    answers = [answer for answer in lived.answers if answer]
    fleet = Fleet(
        replicas=settings.replicas,
        profile=profile,
        block_size=played.block_size,
        admission=ADMISSION[OURS],
        rules=rules,
        starvation_s=settings.starvation_s,
        names=lived.names,
    )
    virtual = [in_virtual_time(fleet, arrivals)]
    virtual += (in_virtual_time(fleet, later(arrivals, seed)) for seed in range(PLAYS))
    about = {
        "requests": len(arrivals),
        "replicas": settings.replicas,
        "block_size": played.block_size,
        "failed": len(arrivals) - len(answers),
        "router_busy": lived.busy,
    }
    return {**about, **compared(Played.of(answers, lived.reasons), virtual)}


def compared(real: Played, virtual: Sequence[Played]) -> dict[str, Any]:
    """The real one with the first of the others, and between which figures these lie."""
    first = virtual[0]
    return {
        "hit_rate": {
            "real": real.hit_rate,
            "virtual": first.hit_rate,
            "points": real.hit_rate - first.hit_rate,
            "virtual_range": _range([one.hit_rate for one in virtual]),
        },
        "ttft_mean": {
            **_ratio(real.mean, first.mean),
            "virtual_range": _range([one.mean for one in virtual]),
        },
        "ttft_p50": _ratio(percentile(real.ttft, 0.5), percentile(first.ttft, 0.5)),
        "ttft_p99": _ratio(percentile(real.ttft, 0.99), percentile(first.ttft, 0.99)),
        "reasons": {"real": real.reasons, "virtual": first.reasons},
    }


def disagreements(result: dict[str, Any]) -> Iterator[str]:
    """Where real and virtual time differ by more than they may, in words."""
    if result["failed"]:
        yield f"{result['failed']} requests failed"
    points, ratio = result["hit_rate"]["points"], result["ttft_mean"]["ratio"]
    if abs(points) > HIT_POINTS:
        yield f"hit rate: {points:+.1f} points"
    if abs(ratio - 1) > TTFT_SHARE:
        yield f"mean TTFT: {ratio:.3f} of that in virtual time"


def spoken(arrival: Arrival, vocabulary: int) -> Arrival:
    """The same request in tokens that a real replica knows."""
    room = vocabulary - FIRST_TOKEN
    tokens = (FIRST_TOKEN + token % room for token in memoryview(arrival.prompt).cast("I"))
    return replace(arrival, prompt=array("I", tokens).tobytes())


def later(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The same requests, each a little later."""
    rng = random.Random(seed)
    moved = (replace(arrival, at=arrival.at + rng.uniform(0, SHIFT_S)) for arrival in arrivals)
    return sorted(moved, key=lambda arrival: arrival.at)


def in_virtual_time(fleet: Fleet, arrivals: Sequence[Arrival]) -> Played:
    """The same requests on a fleet that does not exist."""
    served = Simulation(fleet, partial(policy, OURS, 0)).run(arrivals, lambda: None)
    answers = [Answer(one.ttft, one.tokens, one.cached) for one in served if one.first >= 0]
    return Played.of(answers, Counter(one.reason for one in served))


@contextmanager
def _replicas(settings: SimulateSettings, profile: Profile, block_size: int) -> Iterator[Replicas]:
    """Processes with the timing of the profile, the limits and the order of virtual time."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(profile.model_dump(), file)
        file.flush()
        flags = {
            "engine": "simulated",
            "profile": file.name,
            "served-name": MODEL,
            "block-size": block_size,
            "policy": ADMISSION[OURS],
            "max-running": 256,
            "starvation-s": settings.starvation_s,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        with replica_processes(settings.replicas, words) as replicas:
            yield replicas


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that no process stays behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ratio(real: float, virtual: float) -> dict[str, float]:
    return {"real": real, "virtual": virtual, "ratio": real / virtual if virtual else 0.0}


def _range(figures: Sequence[float]) -> list[float]:
    return [min(figures), max(figures)]
