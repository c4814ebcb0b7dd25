"""Where replicas are: a stream of address sets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol


class Discovery(Protocol):
    """Yields the full set of gRPC addresses (host:port), first at once, then on every change."""

    def watch(self) -> AsyncIterator[frozenset[str]]: ...


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses
        await asyncio.Event().wait()
