"""A server of the fleet as the rest of the router sees it: a replica's link, or an upstream."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hotbranch.v1.cache_pb2 import Load
from hotbranch.v1.replica_pb2 import Description
from router.fleet.holder import Holder
from router.fleet.link import State
from router.fleet.outstanding import Outstanding


class Lost(Exception):
    """The server went before the first token: place the prompt again."""


class Reports(Protocol):
    """What became of a server's reports of its cache."""

    @property
    def recoveries(self) -> Counter[str]:
        """Breaks in them, by kind."""

    @property
    def heard_at(self) -> float:
        """When the last one came, in seconds of a monotonic clock; 0.0 before the first."""


class Member(Protocol):
    """See `Link`, whose attributes these are."""

    @property
    def address(self) -> str: ...
    @property
    def replica_id(self) -> str: ...
    @property
    def state(self) -> State: ...
    @property
    def reported_state(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def description(self) -> Description | None: ...
    @property
    def holders(self) -> Sequence[Holder]: ...
    @property
    def load(self) -> Load | None: ...
    @property
    def outstanding(self) -> Outstanding: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def watcher(self) -> Reports: ...


M = TypeVar("M", bound=Member)


class Members(Protocol[M]):
    """The servers there are."""

    changed: Callable[[M], None]

    @property
    def links(self) -> list[M]: ...

    def takes(self, link: M, /) -> bool:
        """Whether new requests may go to it."""
