"""How fast what a replica caches is replaced, by what it was sent and did not have."""

from math import exp

MEMORY_S = 30.0  # what is older by this counts a third


class Turnover:
    """Pure. Where requests spread evenly over full caches, each keeps what it has for as long, and
    nothing more is reused by moving any of it (characteristic times: Che, Tung and Wang 2002).
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at = 0.0

    def sent(self, tokens: int, now: float) -> None:
        """A prompt came that will store so many."""
        self._tokens = self.lately(now) + tokens
        self._at = now

    def lately(self, now: float) -> float:
        """Tokens that were stored, the older the less."""
        return self._tokens * exp((self._at - now) / MEMORY_S)
