"""What steps of an engine cost, measured."""

DECAY = 0.9  # weight of the past in the moving averages
TELLING = 128  # tokens of prefill that take longer than what any step takes


class StepCost:
    """Measured cost of steps, as moving averages. 0 until measured."""

    def __init__(self) -> None:
        self.step_s = 0.0  # of a step that only decodes
        self._prefill_s = self._prefill_tokens = 0.0

    @property
    def prefill_s_per_token(self) -> float:
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def observe(self, prefill: int, seconds: float) -> None:
        """A step took so long; `prefill` are the prompt tokens that it computed."""
        if not prefill:
            self.step_s = DECAY * self.step_s + (1 - DECAY) * seconds if self.step_s else seconds
            return
        if not self.step_s and prefill < TELLING:
            return  # most of it is the step itself, of which nothing is known yet
        # Reading the weights costs a step, whatever it computes: without taking that off, a replica
        # that sees only short suffixes would look slow. For the same reason sums decay, not ratios.
        self._prefill_s = DECAY * self._prefill_s + max(0.0, seconds - self.step_s)
        self._prefill_tokens = DECAY * self._prefill_tokens + prefill
