"""What a server's answers say of its speed, where it does not say so itself."""

KEPT = 0.98  # of what was seen, with each request more
FEW = 8  # requests, before a line is drawn through them; events, before gaps between them count
TELLING = 128  # tokens of prefill that take longer than what any request takes
RECENT = 0.05  # weight of the last stream among those before
SPREAD = 0.05  # of prompt sizes, as a variance over the mean squared, that tells a slope


class Speed:
    """Pure. Seconds, 0 until known.

    The time to a first byte is a line over the tokens that were computed: its slope is what a token
    costs, the rest is what every request takes (least squares, old ones less). A few requests make
    no line: until there are enough, long prompts' time is all taken for their tokens'.
    """

    def __init__(self) -> None:
        self.prefill_s_per_token = 0.0
        self.step_s = 0.0
        self._seen = 0
        # decayed sums of: 1, tokens, seconds, tokens squared, tokens times seconds
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def began(self, tokens: int, seconds: float) -> None:
        """A server that had nothing else of ours to prefill took so long for these."""
        self._seen += 1
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        old = self._n, self._x, self._y, self._xx, self._xy
        sums = [KEPT * before + more for before, more in zip(old, new, strict=True)]
        self._n, self._x, self._y, self._xx, self._xy = sums
        spread = self._n * self._xx - self._x * self._x
        few = self._seen < FEW
        if not self._x or (few and self._x < TELLING * self._n):
            return
        slope = self._y / self._x
        if not few and spread > SPREAD * self._x * self._x:
            slope = min(slope, (self._n * self._xy - self._x * self._y) / spread)
        if slope > 0:
            self.prefill_s_per_token = slope

    def streamed(self, events: int, seconds: float) -> None:
        """A stream brought so many events, in so long from the first to the last."""
        if events < FEW:
            return
        gap = seconds / (events - 1)
        self.step_s += (RECENT if self.step_s else 1.0) * (gap - self.step_s)
