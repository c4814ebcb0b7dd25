"""Ways to choose a server: our own, and those of others that it is compared with."""

from collections.abc import Callable, Mapping
from typing import Literal

from router.schedule.policies.dynamo_linear import DynamoLinear
from router.schedule.policies.hashing import ConsistentHashBounded, SessionSticky
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.policies.llm_d import LlmD
from router.schedule.policies.lmetric import LMetric
from router.schedule.policies.load import LeastLoad, PowerOfTwo, RoundRobin
from router.schedule.policies.preble_e2 import PrebleE2
from router.schedule.policies.sglang_threshold import SglangThreshold
from router.schedule.scheduler import Policy

Admission = Literal["fcfs", "longest_prefix", "least_uncached"]

# by name, from a seed
POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "hotbranch": lambda seed: Hotbranch(),
    "round_robin": lambda seed: RoundRobin(),
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "session_sticky": lambda seed: SessionSticky(),
    "consistent_hash_bounded": lambda seed: ConsistentHashBounded(),
    "sglang_threshold": SglangThreshold,
    "llm_d": LlmD,
    "preble_e2": lambda seed: PrebleE2(),
    "dynamo_linear": DynamoLinear,
    "lmetric": LMetric,
}

# In which order an engine admits what waits, in the system that a policy comes from. vLLM and
# SGLang (`schedule_policy` in python/sglang/srt/server_args.py) default to arrival. The local
# scheduler of Preble (algorithm 3) prefers what has more of its prompt cached.
ADMISSION: Mapping[str, Admission] = {
    **dict.fromkeys(POLICIES, "fcfs"),
    "hotbranch": "least_uncached",
    "preble_e2": "longest_prefix",
}


def policy(name: str, seed: int) -> Policy:
    """A policy by its name. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}: one of {', '.join(POLICIES)}")
    return POLICIES[name](seed)
