"""Uncached prompt tokens a replica still has to prefill: what it said last, and what we sent since.

A report is old when it arrives (field reports: a router that trusts polled load alone sends every
request of one interval to one worker). Other routers' work is only in the report; our own is known.
"""


class Outstanding:
    """Pure."""

    def __init__(self) -> None:
        self._reported = 0
        self._reports = 0
        self._sent: dict[int, tuple[int, int, int]] = {}  # ticket -> (reports before, tokens, rank)
        self._ours = 0
        self._since_report = 0

    def sent(self, ticket: int, tokens: int, rank: int = 0) -> None:
        """A request was submitted that needs `tokens` of prefill. Lower ranks go first there."""
        self._sent[ticket] = (self._reports, tokens, rank)
        self._ours += tokens
        self._since_report += tokens

    def settled(self, ticket: int) -> None:
        """The request produced its first token, or ended. Idempotent."""
        entry = self._sent.pop(ticket, None)
        if entry is not None:
            reports, tokens, _ = entry
            self._ours -= tokens
            if reports == self._reports:
                self._since_report -= tokens

    def reported(self, tokens: int) -> None:
        """The replica's own figure arrived."""
        self._reported = tokens
        self._reports += 1
        self._since_report = 0

    @property
    def tokens(self) -> int:
        """The estimate. Never below our own work: a report may have crossed it on the way."""
        return max(self._reported + self._since_report, self._ours)

    def before(self, tokens: int, rank: int = 0) -> int:
        """What goes before a request that needs `tokens`, where of a rank the least goes first: of
        our own only what needs no more, of others' all."""
        mine = rank, tokens
        ours = sum(size for _, size, other in self._sent.values() if (other, size) <= mine)
        return self.tokens - self._ours + ours
