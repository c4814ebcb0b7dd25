"""The replicas that discovery names, each with its link."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from hotbranch.log import event
from router.fleet.discovery import Discovery
from router.fleet.link import Link, State
from router.fleet.watcher import Watcher

log = logging.getLogger(__name__)


class Fleet:
    """Keeps one link per address. A replica that discovery drops finishes its work, then goes.

    `changed` is called with a link that has come, gone, or reported.
    """

    def __init__(
        self,
        discovery: Discovery,
        fingerprints: Mapping[str, str],
        watcher: Callable[[str], Watcher],
        drain_s: float,
    ) -> None:
        self.changed: Callable[[Link], None] = _nobody
        self._discovery = discovery
        self._fingerprints = fingerprints
        self._watcher = watcher
        self._drain_s = drain_s
        self._links: dict[str, Link] = {}
        self._leaving: dict[str, tuple[Link, asyncio.Task[None]]] = {}
        self._leavings: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def ready(self, model: str) -> list[Link]:
        """Links that take requests for a served model name."""
        return [
            link
            for link in self._links.values()
            if self.takes(link) and link.description and link.description.model == model
        ]

    def takes(self, link: Link) -> bool:
        """Whether new requests may go to it."""
        return link.state is State.READY and self._links.get(link.address) is link

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="fleet")

    async def stop(self) -> None:
        """Close every link at once."""
        if self._task:
            self._task.cancel()
        for task in self._leavings:
            task.cancel()
        links = [*self._links.values(), *(link for link, _ in self._leaving.values())]
        self._links.clear()
        self._leaving.clear()
        await asyncio.gather(*(link.close() for link in links))

    async def _follow(self) -> None:
        async for addresses in self._discovery.watch():
            for address in addresses - self._links.keys():
                link = self._returned(address) or Link(
                    address,
                    self._fingerprints,
                    self._watcher(address),
                    lambda link: self.changed(link),
                )
                self._links[address] = link
                self.changed(link)
            for address in self._links.keys() - addresses:
                link = self._links.pop(address)
                self.changed(link)
                task = asyncio.create_task(self._leave(link))
                self._leaving[address] = link, task
                self._leavings.add(task)
                task.add_done_callback(self._leavings.discard)

    def _returned(self, address: str) -> Link | None:
        """The link of an address that discovery names again before its work was finished."""
        link, task = self._leaving.pop(address, (None, None))
        if task:
            task.cancel()
        return link

    async def _leave(self, link: Link) -> None:
        """Nothing new is placed on a link that is not in `links`; what it has may finish."""
        event(log, "replica leaves", replica=link.replica_id, in_flight=link.in_flight)
        try:
            async with asyncio.timeout(self._drain_s):
                await link.idle.wait()
        except TimeoutError:
            event(
                log,
                "replica left unfinished",
                replica=link.replica_id,
                open=link.in_flight,
            )
        del self._leaving[link.address]
        await link.close()


def _nobody(link: Link) -> None:
    pass
