"""What a simulation says of a policy. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.fleet.simulation import Served
from replicas.simulated.profile import Profile

SLO_S, SLO_FACTOR = 1.0, 3.0  # the first token by the larger of this, and so often its own prefill
TENANTS_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Spread:
    """Of times, in seconds."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(times: Iterable[float]) -> "Spread":
        """Percentiles are times that occurred; zeros when there are none."""
        ordered = sorted(times)
        if not ordered:
            return Spread(0.0, 0.0, 0.0)
        mean = sum(ordered) / len(ordered)
        return Spread(mean, percentile(ordered, 0.5), percentile(ordered, 0.99))


@dataclass(frozen=True, slots=True)
class TenantReport:
    """`service` in tokens of prompt and reply, for each second that its requests spent here."""

    requests: int
    ttft_p99: float
    service: float


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds, rates by second of the makespan; the other shares are of 1.

    `inter_token` spreads the means of the requests, `stall_p99` their longest gaps. A request is
    good when its first token came within the objective: `goodput` counts them a second, `good` is
    their share. `imbalance` is the most prompt tokens that a replica computed over the mean, and
    `fairness` Jain's index of the tenants' service.
    """

    policy: str
    requests: int
    failed: int
    ideal_hit_rate: float
    delivered_hit_rate: float
    believed_hit_rate: float
    ttft: Spread
    inter_token: Spread
    stall_p99: float
    goodput: float
    good: float
    imbalance: float
    fairness: float
    requests_per_s: float
    output_tokens_per_s: float
    makespan_s: float
    reasons: dict[str, int]
    tenants: dict[str, TenantReport]


def report(
    policy: str, served: Sequence[Served], ideal: Sequence[int], profile: Profile, replicas: int
) -> Report:
    """`ideal` are the tokens of each prompt that a cache without bound would have had."""
    done = [one for one in served if one.first >= 0]
    computed = [0] * replicas
    for one in done:
        computed[one.replica] += one.tokens - one.cached
    good = sum(one.ttft <= objective(one.tokens, profile) for one in done)
    start = min(one.at for one in served)
    makespan = max(one.end for one in served) - start or 1.0
    total = sum(one.tokens for one in served)
    tenants = _tenants(done)
    reasons: dict[str, int] = {}
    for one in served:
        reasons[one.reason] = reasons.get(one.reason, 0) + 1
    return Report(
        policy=policy,
        requests=len(served),
        failed=len(served) - len(done),
        ideal_hit_rate=sum(ideal) / total,
        delivered_hit_rate=sum(one.cached for one in done) / total,
        believed_hit_rate=sum(one.matched for one in done) / total,
        ttft=Spread.of(one.ttft for one in done),
        inter_token=Spread.of(one.inter_token for one in done if one.generated > 1),
        stall_p99=percentile(sorted(one.gap for one in done), 0.99),
        goodput=good / makespan,
        good=good / len(served),
        imbalance=max(computed) * replicas / (sum(computed) or 1),
        fairness=jain([tenant.service for tenant in tenants.values()]),
        requests_per_s=len(done) / makespan,
        output_tokens_per_s=sum(one.generated for one in done) / makespan,
        makespan_s=makespan,
        reasons=reasons,
        tenants=dict(list(tenants.items())[:TENANTS_SHOWN]),
    )


def objective(tokens: int, profile: Profile) -> float:
    """Seconds that the first token of a prompt may take: an idle replica without a cache bounds
    what can be asked of a long one.
    """
    return max(SLO_S, SLO_FACTOR * unloaded(tokens, profile))


def unloaded(tokens: int, profile: Profile) -> float:
    """Seconds of its prefill alone, chunk by chunk."""
    chunk = profile.chunk_tokens
    sizes = ((start, min(chunk, tokens - start)) for start in range(0, tokens, chunk))
    return sum(profile.step(size, size * (start + size / 2)) for start, size in sizes)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)] if ordered else 0.0


def jain(values: Sequence[float]) -> float:
    """Jain, Chiu and Hawe 1984: 1 when all are the same, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _tenants(done: Sequence[Served]) -> dict[str, TenantReport]:
    def name(one: Served) -> str:
        return one.tenant

    return {
        tenant: _tenant(list(theirs)) for tenant, theirs in groupby(sorted(done, key=name), name)
    }


def _tenant(theirs: Sequence[Served]) -> TenantReport:
    seconds = sum(one.end - one.at for one in theirs)
    tokens = sum(one.tokens + one.generated for one in theirs)
    ttft = percentile(sorted(one.ttft for one in theirs), 0.99)
    return TenantReport(len(theirs), ttft, tokens / seconds if seconds else 0.0)
