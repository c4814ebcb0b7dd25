"""The upstreams of a router: those that its settings name."""

from collections.abc import Callable, Sequence

from router.fleet.link import State
from router.generation import Named
from router.upstream.link import Upstream


class Upstreams:
    """Has what `router.fleet.member.Members` asks for. `connect` makes the links, which are given
    what to call when they change. Needs a running event loop from `start` on."""

    def __init__(self, connect: Callable[[Callable[[Upstream], None]], Sequence[Upstream]]) -> None:
        self.changed: Callable[[Upstream], None] = _nobody
        self._connect = connect
        self._links: Sequence[Upstream] = ()

    @property
    def links(self) -> list[Upstream]:
        return list(self._links)

    def takes(self, link: Upstream) -> bool:
        return link.state is State.READY

    async def start(self) -> None:
        self._links = self._connect(lambda link: self.changed(link))

    async def stop(self) -> None:
        for link in self._links:
            await link.close()

    def named(self, name: str) -> Named | None:
        """What a model's name stands for at those that take requests and list it."""
        ready = [link for link in self._links if self.takes(link)]
        first = next((link for link in ready if name in link.names), None)
        if first is None or first.description is None:
            return None
        pool, (model, adapter) = first.description.model, first.names[name]
        others = [link for link in ready if link.names.get(name) != (model, adapter)]
        return Named(pool, model, adapter, frozenset(link.address for link in others))

    def idlest(self, avoids: frozenset[str]) -> Upstream | None:
        """The one that has least of ours to do."""
        ready = [link for link in self._links if self.takes(link) and link.address not in avoids]
        return min(ready, key=lambda link: link.in_flight, default=None)


def _nobody(link: Upstream) -> None:
    pass
