"""What `bench.engine` measures, point by point.

Both sides play the same load in turn, each round another one; of each the fastest round counts,
because whatever else runs on the machine only ever makes a round slower. Rates are tokens a second.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, sqrt
from statistics import mean, stdev
from typing import Any

from bench.engine_workloads import (
    CHAT,
    RAG,
    UNIQUE,
    VOICE,
    Load,
    aligned,
    chat,
    grouped,
    permuted,
    prompts,
)
from bench.engines.closed_loop import Session, Turn
from bench.engines.side import Side

RUNNING = 8  # sequences decoded together, on both sides
DECODED = 16  # tokens timed for each sequence: short rounds, of which one falls in a quiet moment
POOL = 16384  # tokens of KV that both sides have; a load may use less
PRESSED, AMPLE = 4096, POOL  # pools of the chat load
ROWS = 1000  # of the matrix products alone
PAIRS = 8  # runs of two policies, one after the other
SPEEDUP, SHARE = 6.4, 0.95  # aims of the RAG load: this speed-up, or this share of the limit
POLICIES = ("fcfs", "longest_prefix", "least_uncached", "dfs_weight")

Point = dict[str, Any]
Played = dict[str, float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. `divisor` shortens the texts of the workloads."""

    rounds: int
    loads: int  # rounds of a workload
    rag: int  # rounds of the RAG load
    divisor: int
    requests: int  # a group, where a hit rate does not ask for more
    conversations: int
    everything: bool  # also what takes minutes: vLLM where it reuses nothing, all policies
    seconds: float  # after which no further point is begun


QUICK = Effort(
    3, loads=2, rag=3, divisor=4, requests=6, conversations=24, everything=False, seconds=540
)
FULL = Effort(
    7, loads=2, rag=2, divisor=1, requests=24, conversations=24, everything=True, seconds=inf
)


@dataclass(slots=True)
class Bench:
    """The two engines; `vllm` is None where there is none, and ratios to it are left out."""

    ours: Side
    vllm: Side | None
    effort: Effort
    say: Callable[[str], None]
    results: dict[str, Point] = field(default_factory=dict)

    def sides(self) -> list[Side]:
        return [self.ours] if self.vllm is None else [self.ours, self.vllm]

    def warm_up(self) -> None:
        """What an engine does once for a size of batch, it does before it is measured."""
        for side in self.sides():
            side.ask("open", kv_tokens=POOL, running=RUNNING)
            for tokens, count in ((1000, 1), (200, 1), (60, RUNNING)):
                load = prompts(count, tokens, 4, f"warm-up {tokens}")
                side.ask("run", sessions=load, outstanding=count)

    def prefill(self, tokens: int) -> Point:
        """One cold prompt."""

        def measure(side: Side, number: int) -> float:
            side.ask("open", kv_tokens=POOL, running=RUNNING)
            load = prompts(1, tokens, 1, f"{tokens} tokens, round {number}")
            return float(side.ask("run", sessions=load, outstanding=1)["seconds"])

        return self._compare(tokens, measure, max(2, self.effort.rounds * 1000 // tokens))

    def decode(self, batch: int, context: int) -> Point:
        """Tokens behind prompts that are cached; what more tokens take than one."""
        contexts = [session[0].added for session in prompts(batch, context, 1, f"b{batch}")]
        for side in self.sides():
            side.ask("open", kv_tokens=POOL, running=RUNNING)
            self._seconds_to(side, contexts, 1)
        first: dict[int, float] = {}

        def measure(side: Side, number: int) -> float:
            short = self._seconds_to(side, contexts, 1)
            first[id(side)] = min(short, first.get(id(side), short))
            return self._seconds_to(side, contexts, 1 + DECODED) - first[id(side)]

        return self._compare(batch * DECODED, measure, self.effort.rounds)

    def products(self) -> Point:
        """Our prefill of 1,000 tokens, and the matrix products that it cannot do without."""
        prefill, alone = inf, inf
        for number in range(2 * self.effort.rounds):
            load = prompts(1, ROWS, 1, f"floor, round {number}")
            self.ours.ask("open", kv_tokens=POOL, running=RUNNING)
            prefill = min(prefill, self.ours.ask("run", sessions=load, outstanding=1)["seconds"])
            alone = min(alone, self.ours.ask("products", rows=ROWS)["seconds"])
        return {"ours": ROWS / prefill, "products": ROWS / alone, "ratio": alone / prefill}

    def rag(self) -> Point:
        """One hot set of room, tenants interleaved: with reuse, without, and vLLM."""
        shape = replace(RAG, requests=self.effort.requests).scaled(self.effort.divisor)
        load = grouped(shape, RUNNING, "rag")
        # What a scheduler that knew all requests beforehand would do in this pool: group by group,
        # each shared part computed once. `ample` is the same in a pool with room for everything.
        groups = [load.sessions[i :: shape.groups] for i in range(shape.groups)]
        ordered = load._replace(sessions=list(chain(*groups)))
        ample = ordered._replace(kv_tokens=POOL)
        best = self._fastest(
            {
                "ours": lambda: self._play(self.ours, load),
                "off": lambda: self._play(self.ours, load, policy="fcfs", reuse=False),
                "limit": lambda: self._play(self.ours, ordered),
                "ample": lambda: self._play(self.ours, ample),
            }
            | self._peer(load),
            self.effort.rag,
        )
        speedup = best["off"]["seconds"] / best["ours"]["seconds"]
        limit = best["off"]["seconds"] / best["limit"]["seconds"]
        return _against(best) | {
            "reuse_off_fcfs": _rate(best["off"]),
            "speedup": speedup,
            "limit": limit,
            "ample_limit": best["off"]["seconds"] / best["ample"]["seconds"],
            "share_of_limit": speedup / limit,
            "reached": max(speedup / SPEEDUP, speedup / limit / SHARE),
            "kv_tokens": load.kv_tokens,
        }

    def voice(self) -> Point:
        """A fixed preamble for each of sixteen speakers."""
        load = grouped(VOICE.scaled(self.effort.divisor), RUNNING, "voice")
        peer = self._peer(load) if self.effort.everything else {}
        best = self._fastest({"ours": lambda: self._play(self.ours, load)} | peer)
        return _against(best) | {"kv_tokens": load.kv_tokens}

    def chat(self) -> Point:
        """Conversations in a pool that holds few of them: the policies, and vLLM."""
        load = self._chat(PRESSED)
        default = self.ours.facts["policy"]
        policies = POLICIES if self.effort.everything else ("fcfs", default)
        best = self._fastest(
            {policy: self._policy(load, policy) for policy in policies} | self._peer(load)
        )
        best["ours"] = best[default]
        fcfs = best["fcfs"]["seconds"]
        return _against(best) | {
            "over_fcfs": {policy: fcfs / best[policy]["seconds"] for policy in policies},
            "hit_rates": {policy: _hit_rate(best[policy]) for policy in policies},
            "default_over_fcfs": fcfs / best["ours"]["seconds"],
            "kv_tokens": load.kv_tokens,
        }

    def chat_ample(self) -> Point:
        """The same conversations in a pool that holds them all: order must not cost anything.

        Single runs differ by more than the policies do, so pairs are compared, each policy first
        in every other one: the mean of their ratios, and its standard error.
        """
        load = self._chat(AMPLE)
        default = str(self.ours.facts["policy"])
        names = ["fcfs", default]
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(max(PAIRS, self.effort.rounds)):
            for name in names:
                rates[name].append(_rate(self._policy(load, name)()))
            names.reverse()
            self.say("  " + ", ".join(f"{name}: {rates[name][-1]:.0f} tok/s" for name in rates))
        ratios = [ours / fcfs for ours, fcfs in zip(rates[default], rates["fcfs"], strict=True)]
        noise = stdev(ratios) / sqrt(len(ratios))
        return {
            "ours": mean(rates[default]),
            "fcfs": mean(rates["fcfs"]),
            "ratio": mean(ratios),
            "noise": noise,
            "ratio_within_noise": mean(ratios) + 2 * noise,
            "kv_tokens": load.kv_tokens,
        }

    def order(self) -> Point:
        """The RAG requests, their parts in one order and in any."""
        shape = replace(RAG, requests=self.effort.requests).scaled(self.effort.divisor)
        canonical = self._play(self.ours, grouped(shape, RUNNING, "rag"))
        any_order = self._play(self.ours, permuted(shape, RUNNING, "rag"))
        return {
            "ours": _rate(canonical),
            "permuted": _rate(any_order),
            "hit_rate": _hit_rate(canonical),
            "permuted_hit_rate": _hit_rate(any_order),
        }

    def unique(self) -> Point:
        """Prompts that share nothing: the time spent in the tree, as a share of the run.

        The clock is around every call into the tree, in the run itself. Two runs with and without
        it would differ by more from noise alone.
        """
        shape = replace(UNIQUE, requests=4 * self.effort.requests).scaled(self.effort.divisor)
        load = grouped(shape, RUNNING, "unique")
        best = self._fastest({"ours": lambda: self._play(self.ours, load, clock=True)}, 2)
        played = best["ours"]
        return {"ours": _rate(played), "tree_share": played["tree_seconds"] / played["seconds"]}

    def _compare(self, tokens: int, measure: Callable[[Side, int], float], rounds: int) -> Point:
        """Rounds of both sides in turn; the rates of the fastest."""
        seconds: list[list[float]] = [[] for _ in self.sides()]
        for number in range(rounds):
            for side, took in zip(self.sides(), seconds, strict=True):
                took.append(measure(side, number))
        rates = [tokens / min(took) for took in seconds]
        point: Point = {"ours": rates[0]}
        if len(rates) > 1:
            point |= {"vllm": rates[1], "ratio": rates[0] / rates[1]}
        return point

    def _fastest(
        self, variants: dict[str, Callable[[], Played]], rounds: int = 0
    ) -> dict[str, Played]:
        """The fastest round of each variant; they take turns."""
        best: dict[str, Played] = {}
        for _ in range(rounds or self.effort.loads):
            for name, play in variants.items():
                played = play()
                self.say(
                    f"  {name}: {played['seconds']:.1f} s, {_rate(played):.0f} tok/s,"
                    f" hit rate {_hit_rate(played):.3f}"
                )
                if name not in best or played["seconds"] < best[name]["seconds"]:
                    best[name] = played
        return best

    def _peer(self, load: Load) -> dict[str, Callable[[], Played]]:
        side = self.vllm
        return {} if side is None else {"vllm": lambda: self._play(side, load)}

    def _policy(self, load: Load, policy: str) -> Callable[[], Played]:
        return lambda: self._play(self.ours, load, policy=policy)

    def _play(self, side: Side, load: Load, **how: Any) -> Played:
        side.ask("open", kv_tokens=load.kv_tokens, running=RUNNING, **how)
        return side.ask("run", sessions=load.sessions, outstanding=load.outstanding)

    def _chat(self, kv_tokens: int) -> Load:
        divisor = self.effort.divisor
        shape = replace(CHAT, sessions=self.effort.conversations)
        return chat(shape, aligned(kv_tokens // divisor), divisor, "chat")

    def _seconds_to(self, side: Side, contexts: list[list[int]], reply: int) -> float:
        sessions: list[Session] = [[Turn(tokens, reply)] for tokens in contexts]
        return float(side.ask("run", sessions=sessions, outstanding=len(sessions))["seconds"])


def _rate(played: Played) -> float:
    """Tokens served a second, cached ones included: what a client sees."""
    return (played["prompt"] + played["generated"]) / played["seconds"]


def _hit_rate(played: Played) -> float:
    return played["cached"] / played["prompt"]


def _against(best: dict[str, Played]) -> Point:
    point: Point = {"ours": _rate(best["ours"]), "hit_rate": _hit_rate(best["ours"])}
    if "vllm" in best:
        point["vllm"] = _rate(best["vllm"])
        point["ratio"] = point["ours"] / point["vllm"]
        point["vllm_hit_rate"] = _hit_rate(best["vllm"])
    return point
