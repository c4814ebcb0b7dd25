"""Room in a replica's cache for what runs: what it said last, and what we sent and got back since.

What runs keeps its tokens until it ends. Where they are all taken, a prompt waits for others to end
although nobody computes before it, so that outstanding prefill alone does not tell how busy it is.
What a prompt finds there counts once a report says that it is used: others may use it already.
"""

from math import inf

CROSSING = 2  # reports until one surely counts a request: until the step that admits it is over
RECENT = 0.05  # weight of the last request among those before
FULL = 0.95  # of the cache: what runs grows by a token a step


class Memory:
    """Pure. Tokens; `room` for more, `generated` by a request as a moving average."""

    def __init__(self) -> None:
        self.total: float = inf  # where it does not say
        self.room: float = inf  # kept up to date: it is read far more often than it changes
        self.generated = 0.0
        self._used = 0  # by its last report
        self._reports = 0
        self._sent: dict[int, tuple[int, int]] = {}  # ticket -> (reports before, tokens)
        self._coming = 0  # of these, what a report may not count
        self._freed = 0  # since the last report

    @property
    def used(self) -> int:
        """What runs there keeps, nearly."""
        return max(0, self._used + self._coming - self._freed)

    def sent(self, ticket: int, tokens: int) -> None:
        """A request was submitted that takes so many more than are there."""
        self._sent[ticket] = self._reports, tokens
        self._coming += tokens
        self._sum()

    def ended(self, ticket: int, generated: int) -> None:
        """It ended, and frees what it took. Idempotent."""
        entry = self._sent.pop(ticket, None)
        if entry is None:
            return
        at, tokens = entry
        if not self._counts(at):
            self._coming -= tokens
        elif generated:  # else it may not have run
            self._freed += tokens + generated
        self._sum()
        if generated:
            self.generated += (RECENT if self.generated else 1.0) * (generated - self.generated)

    def reported(self, used: int, total: int) -> None:
        """The replica's own figures arrived."""
        self._reports += 1
        self._used, self.total = used, total or inf
        self._freed = 0
        self._coming = sum(size for at, size in self._sent.values() if not self._counts(at))
        self._sum()

    def _sum(self) -> None:
        self.room = FULL * self.total - self.used

    def wait_s(self, tokens: float, step_s: float) -> float:
        """Seconds until there is room for so many: each that runs takes as many steps as it
        generates tokens, so that in one of them this part of a full cache becomes free."""
        over = max(0.0, tokens - self.room)
        return over * self.generated * step_s / (FULL * self.total) if over else 0.0

    def _counts(self, at: int) -> bool:
        return self._reports - at >= CROSSING
