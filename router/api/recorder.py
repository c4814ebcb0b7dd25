"""What the API tells whoever keeps the metrics. The recorder has its own clock."""

from typing import Protocol


class Recording(Protocol):
    """One generation, from a valid request to its end. Times are taken when the calls come."""

    def routed(
        self,
        replica_id: str,
        prompt_tokens: int,
        predicted_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """A route is open, and its first delta is there. Once for each prompt of the request."""

    def step(self, tokens: int) -> None:
        """An engine step brought that many new tokens, over all choices."""

    def settled(
        self,
        replica_id: str,
        predicted_tokens: int,
        cached_tokens: int | None,
        generated: int,
    ) -> None:
        """What the end of an answer that was passed on says, where `routed` could not know."""

    def finished(self, status: int) -> None:
        """The end, exactly once: an HTTP status, or 499 when the client left before it."""


class Recorder(Protocol):
    def started(self, request_id: str, endpoint: str, tenant: str, model: str) -> Recording: ...

    def unpredicted(self, reason: str) -> None:
        """A request is passed on whose prompt is not known."""

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP answer was begun. `endpoint` is a route of the application, or `unknown`."""
