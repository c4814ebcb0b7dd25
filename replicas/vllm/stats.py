"""What vLLM tells of each step, as plain data."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from replicas.vllm.rank import Stepped


class Stats(StatLoggerBase):  # type: ignore[misc]  # where types are checked there is no vLLM
    """Hands every step of one rank on. vLLM makes one for each rank, through `factory`."""

    def __init__(self, rank: int, stepped: Callable[[Stepped], None]) -> None:
        self._rank = rank
        self._stepped = stepped

    @classmethod
    def factory(cls, stepped: Callable[[Stepped], None]) -> Callable[[VllmConfig, int], "Stats"]:
        return lambda _config, rank: cls(rank, stepped)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        details = scheduler_stats.iteration_details
        if details is None:
            self._stepped(Stepped(self._rank, scheduler_stats.kv_cache_usage))
            return
        prefill, seconds = details.num_ctx_tokens, details.elapsed_ms / 1000
        self._stepped(Stepped(self._rank, scheduler_stats.kv_cache_usage, prefill, seconds))

    def log_engine_initialized(self) -> None:
        """Nothing to tell: the replica logs that it serves."""
