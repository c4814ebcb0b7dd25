"""What a link hands its replica's cache stream to."""

from collections import Counter
from typing import Protocol

from hotbranch.v1.cache_pb2 import CacheUpdate
from hotbranch.v1.replica_pb2 import Description


class ViewLost(Exception):
    """The stream broke its own rules and must be watched anew; `reason` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Watcher(Protocol):
    """Applies the stream of one replica, in order. Times are in seconds of one monotonic clock.

    `recoveries` counts what had to be recovered from, by kind; `heard_at` is when the last message
    came, 0.0 before the first.
    """

    recoveries: Counter[str]
    heard_at: float

    def connected(self, description: Description, comparable: bool) -> None:
        """The replica is reached. Without `comparable` keys its reports say nothing."""

    def restart(self) -> None:
        """A new stream begins: what comes first is a snapshot."""

    def apply(self, update: CacheUpdate, now: float) -> None:
        """Take one message. Raises ViewLost."""

    def lost(self, reason: str) -> None:
        """Count a lost view; `restart` follows."""

    def forget(self) -> None:
        """The replica is out of reach: what it holds is not known."""

    def close(self) -> None:
        """The replica is gone for good."""
