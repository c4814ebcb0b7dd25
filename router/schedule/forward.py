"""Requests that are passed on to upstreams: placed as prompts are, and settled by their answers."""

import time
from functools import partial

from router.fleet.member import Lost
from router.generation import Forward, Named, Unavailable
from router.index.index import Index
from router.schedule.dispatch import ATTEMPTS, QueueingDispatcher
from router.schedule.scheduler import Dispatch
from router.schedule.turn import Turn
from router.upstream.exchange import Declined, Exchange
from router.upstream.fleet import Upstreams
from router.upstream.link import Upstream


class UpstreamForwarder:
    """Implements `router.generation.Forwarder`."""

    def __init__(
        self, upstreams: Upstreams, dispatcher: QueueingDispatcher[Upstream], index: Index
    ) -> None:
        self._upstreams = upstreams
        self._dispatcher = dispatcher
        self._index = index

    def named(self, name: str) -> Named | None:
        return self._upstreams.named(name)

    async def forward(self, forward: Forward) -> Exchange:
        send = partial(self._send, forward)
        pool = forward.pool or self._any_pool()
        try:
            return await self._dispatcher.place(
                forward.prompt, send, pool, forward.tokens, forward.others
            )
        except Unavailable as error:
            if isinstance(error.__cause__, Declined):
                return error.__cause__.exchange
            raise

    async def direct(self, forward: Forward) -> Exchange:
        declined: Declined | None = None
        tried = forward.others
        for _ in range(ATTEMPTS):
            link = self._upstreams.idlest(tried)
            if link is None:
                break
            exchange = link.send(forward, 0, 0, _nothing, _nobody)
            try:
                await exchange.begun()
                return exchange
            except Declined as error:
                declined = error
            except Lost:
                pass
            except BaseException:
                exchange.cancel()
                raise
            tried |= {link.address}
        if declined:
            return declined.exchange
        raise Unavailable("no upstream is ready")

    def _any_pool(self) -> str:
        """Of what no upstream lists, for one of them to say so."""
        link = self._upstreams.idlest(frozenset())
        if link is None or link.description is None:
            raise Unavailable("no upstream is ready")
        return link.description.model

    def _send(self, forward: Forward, turn: Turn[Upstream]) -> Exchange:
        dispatch = turn.dispatch
        return turn.link.send(
            forward,
            dispatch.server.holder.rank,
            dispatch.matched * dispatch.server.block_size,
            partial(turn.began, None),
            partial(self._ended, forward, turn),
        )

    def _ended(self, forward: Forward, turn: Turn[Upstream], exchange: Exchange) -> None:
        if forward.alone:
            self._settle(forward, turn.dispatch, exchange)
        turn.closed(exchange.generated)

    def _settle(self, forward: Forward, dispatch: Dispatch, exchange: Exchange) -> None:
        """The answer says how much was cached: less than believed is taken back."""
        if exchange.cached_tokens is None or exchange.prompt_tokens not in (None, forward.tokens):
            return  # it does not say, or speaks of another prompt than we do
        server = dispatch.server
        blocks = exchange.cached_tokens // server.block_size
        if blocks < dispatch.matched:
            keys = dispatch.job.keys[server.block_size]
            self._index.missed(server.holder, keys, blocks, time.monotonic())


def _nothing() -> None:
    pass


def _nobody(exchange: Exchange) -> None:
    pass
