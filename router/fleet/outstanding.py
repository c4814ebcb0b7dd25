"""Uncached prompt tokens a replica still has to prefill: what it said last, and what we sent since.

A report is old when it arrives (field reports: a router that trusts polled load alone sends every
request of one interval to one worker). What is our own we know, but for how far it has come; what
others sent is only in the report.
"""

CROSSING = 2  # reports until one surely counts a request: the first may have met it on the way


class Outstanding:
    """Pure. `tokens` is the estimate; `ours` what we sent that has not begun, as if none of it were
    computed."""

    def __init__(self) -> None:
        self.tokens = 0  # kept up to date: it is read far more often than it changes
        self._reports = 0
        self._sent: dict[int, tuple[int, int, int]] = {}  # ticket -> (reports before, tokens, rank)
        self.ours = 0
        self._counted = 0  # tokens of ours that the last report surely counts
        self._left = 1.0  # the part of these that was not computed by then
        self._others = 0

    def sent(self, ticket: int, tokens: int, rank: int = 0) -> None:
        """A request was submitted that needs `tokens` of prefill. Lower ranks go first there."""
        self._sent[ticket] = (self._reports, tokens, rank)
        self.ours += tokens
        self._sum()

    def settled(self, ticket: int) -> None:
        """The request produced its first token, or ended. Idempotent."""
        entry = self._sent.pop(ticket, None)
        if entry is not None:
            self.ours -= entry[1]
            if self._counts(entry[0]):
                self._counted -= entry[1]
            self._sum()

    def reported(self, tokens: int) -> None:
        """The replica's own figure arrived."""
        self._reports += 1
        self._counted = sum(size for at, size, _ in self._sent.values() if self._counts(at))
        self._left = min(1.0, tokens / self._counted) if self._counted else 1.0
        self._others = max(0, tokens - self.ours)
        self._sum()

    def before(self, tokens: int, rank: int = 0) -> int:
        """What goes before a request that needs `tokens`, where of a rank the least goes first: of
        our own only what needs no more, of others' all."""
        mine = rank, tokens
        left = ((other, self._remains(at, size)) for at, size, other in self._sent.values())
        return self._others + int(sum(one[1] for one in left if one <= mine))

    def _sum(self) -> None:
        self.tokens = self._others + self.ours - int((1.0 - self._left) * self._counted)

    def _remains(self, at: int, size: int) -> float:
        return self._left * size if self._counts(at) else size

    def _counts(self, at: int) -> bool:
        return self._reports - at >= CROSSING
