"""One upstream as the router reaches it: a plain server by its URL, its state, its load.

A link asks what the server is, checks its token ids against ours, then polls its load and its
health, and begins again, after growing pauses, when it does not answer. Requests go over the same
pool of connections.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping

import aiohttp

from hotbranch.keys import key_check
from hotbranch.log import event
from hotbranch.states import NAMES
from hotbranch.upstream import Upstream as Settings
from hotbranch.v1.cache_pb2 import Load
from hotbranch.v1.replica_pb2 import STATE_SERVING, Description
from router.fleet.holder import Holder
from router.fleet.link import PAUSES_S, State
from router.fleet.outstanding import Outstanding
from router.generation import Forward
from router.prompt.models import Model
from router.upstream import probe
from router.upstream.caches import Caches
from router.upstream.client import Client
from router.upstream.exchange import Exchange, kind
from router.upstream.figures import Figures, from_load, from_metrics
from router.upstream.speed import Speed

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens, of a server that does not say
CACHE_TOKENS = 1 << 18  # of a server that does not say: an 8B model on 80 GB has more
CHUNK_TOKENS = 2048  # vLLM's max_num_batched_tokens where nothing else is set
PREFILL_S_PER_TOKEN = 1e-4  # until it is measured
POLL_S = 0.25
HEALTH, LISTING = 4, 20  # polls from one look at its health, and at its models, to the next
ANSWER_S = 2.0  # for what we ask ourselves
SILENCE_S = 10.0  # without an answer until it counts as lost
USUAL = 0.05  # weight of the last prompt among those before


class Unusable(Exception):
    """The server cannot be used, or not any more."""


class Upstream:
    """Has what `router.fleet.member.Member` asks for, and keeps the exchanges of its server.

    `names` has, by each model name that it lists, our name of the base model and the adapter.
    `changed` is called when its state or its load has changed; when it is lost, before whoever
    reads an answer hears of it.
    """

    def __init__(
        self,
        settings: Settings,
        key: str,
        models: Mapping[str, Model],
        caches: Caches,
        changed: Callable[["Upstream"], None],
    ) -> None:
        self.address = settings.url
        self.replica_id = settings.url.partition("://")[2]
        self.state = State.CONNECTING
        self.problem = ""
        self.reported_state = ""
        self.description: Description | None = None
        self.holders = [Holder(settings.url, rank) for rank in range(settings.ranks)]
        self.load: Load | None = None
        self.outstanding = Outstanding()
        self.watcher = caches
        self.names: dict[str, tuple[str, str]] = {}
        self._settings = settings
        self._models = models
        self._changed = changed
        self._speed = Speed()
        self._usual = 0.0  # tokens that a prompt needs, as a moving average
        self._begun_at = 0.0  # when the last prefill was over
        self._figures: Figures | None = None
        self._source = ""  # path of the figures
        self._mismatch = ""  # in what its model and ours differ
        self._started = 0.0  # when its process began, by the last connection; 0.0 where unknown
        self._tickets = itertools.count(1)
        self._open: dict[Exchange, _Open] = {}
        self._poke = asyncio.Event()
        self._closing = False
        self._client = Client(settings.url, settings.ranks, key)
        self._task = asyncio.create_task(self._run(), name=f"upstream {settings.url}")

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def send(
        self,
        forward: Forward,
        rank: int,
        predicted: int,
        began: Callable[[], None],
        ended: Callable[[Exchange], None],
    ) -> Exchange:
        """Pass a request on, whose prompt is thought to have so many tokens cached there. Never
        blocks. `began` and `ended` are called once each, the first one unless it comes to nothing.
        """
        exchange = Exchange(
            self.replica_id,
            predicted,
            max(0, forward.tokens - predicted),
            forward.stream,
            lambda: self._send(forward, rank),
            self,
        )
        ticket = next(self._tickets)
        self._open[exchange] = _Open(ticket, forward, began, ended)
        self.outstanding.sent(ticket, exchange.uncached)
        if forward.tokens:  # else it is no work
            weight = USUAL if self._usual else 1.0
            self._usual += weight * (exchange.uncached - self._usual)
        if not forward.stream:
            self._look_later(exchange, self._prefill_s(self.outstanding.tokens))
        return exchange

    def began(self, exchange: Exchange) -> None:
        """The server computes no more of its prompt."""
        mine = self._open[exchange]
        self.outstanding.settled(mine.ticket)
        if exchange.stream:
            mine.prefill_s = exchange.began_at - max(exchange.sent_at, self._begun_at)
        self._begun_at = exchange.began_at
        mine.began()

    def ended(self, exchange: Exchange) -> None:
        mine = self._open.pop(exchange)
        self.outstanding.settled(mine.ticket)
        if mine.timer:
            mine.timer.cancel()
        if exchange.events and mine.prefill_s and mine.forward.tokens:
            cached = exchange.predicted_tokens
            if mine.forward.alone and exchange.cached_tokens is not None:
                cached = exchange.cached_tokens
            self._speed.began(max(0, mine.forward.tokens - cached), mine.prefill_s)
            self._speed.streamed(exchange.events, exchange.streamed_s)
        mine.ended(exchange)

    async def close(self) -> None:
        """Disconnect for good; open requests are lost, the server's blocks forgotten."""
        self._closing = True
        self._task.cancel()
        self._disconnected("closed")
        self.watcher.close()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.close()

    async def _send(self, forward: Forward, rank: int) -> aiohttp.ClientResponse:
        try:
            return await self._client.send(forward, rank)
        except aiohttp.ClientError:
            self._poke.set()
            raise

    def _prefill_s(self, tokens: int) -> float:
        speed = self._speed
        return tokens * (speed.prefill_s_per_token or PREFILL_S_PER_TOKEN) + speed.step_s

    def _look_later(self, exchange: Exchange, seconds: float) -> None:
        """An answer in one piece does not tell when its prefill was over: by then it should be,
        unless the server says that requests wait."""
        loop = asyncio.get_running_loop()
        self._open[exchange].timer = loop.call_later(seconds, self._look, exchange)

    def _look(self, exchange: Exchange) -> None:
        if self._figures and self._figures.waiting:
            self._look_later(exchange, POLL_S)
        else:
            exchange.prefilled()

    async def _run(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._connect()
                await self._watch()
                reason = ""
            except Unusable as error:
                reason = str(error)
            except (aiohttp.ClientError, OSError) as error:
                reason = kind(error)
            except Exception as error:
                # A link without its task would keep its state and swallow every request.
                reason = type(error).__name__
                event(log, "upstream failed", logging.ERROR, error, upstream=self.replica_id)
            if self._closing:
                return
            self._disconnected(reason)
            lasted = time.monotonic() - began
            failures = 0 if lasted > PAUSES_S[-1] else failures + 1
            pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    async def _connect(self) -> None:
        """Ask what it is. Raises Unusable, and what the client raises."""
        async with asyncio.timeout(SILENCE_S):
            main, found = await self._list()
            self._figures = await self._find_figures()
            model = self._models.get(main.id)
            differ = await probe.differing(self._client.post, main.id, model) if model else None
        self._mismatch = _mismatch(main.id, model is not None, differ)
        self.names = probe.names(found, main)
        size, blocks = self._cache()
        self.description = Description(
            replica_id=self.replica_id,
            model=main.id,
            block_size=size,
            capacity_blocks=blocks or CACHE_TOKENS // size,
            max_context=main.context or (model.max_context if model else 1 << 30),
            engine=main.owner or "unknown",
            ranks=len(self.holders),
            chunk_tokens=CHUNK_TOKENS,
            key_check=key_check(),
            adapters=sorted(adapter for _, adapter in self.names.values() if adapter),
        )
        comparable = model is not None and not {"texts", "chats"} & set(differ or [])
        started = self._figures.started if self._figures else 0.0
        same = bool(started) and started == self._started
        self._started = started
        self.watcher.connected(self.description, comparable, same)
        self.state, self.reported_state = State.READY, NAMES[STATE_SERVING]
        self._report()
        event(
            log,
            "upstream connected",
            upstream=self.replica_id,
            model=main.id,
            tokens="unchecked" if differ is None else "checked",
            load=self._source or "own",
            problem=self.problem,
        )

    async def _watch(self) -> None:
        """Poll for as long as it answers. Raises as `_connect`."""
        heard_at = time.monotonic()
        for poll in itertools.count(1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poke.wait()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._poll(poll)
            except TimeoutError:
                if time.monotonic() - heard_at > SILENCE_S:
                    raise Unusable(f"it was silent for {SILENCE_S:g} s") from None
                continue
            heard_at = time.monotonic()
            self._report()

    async def _poll(self, poll: int) -> None:
        if self._source:
            self._figures = await self._read_figures(self._source)
        if poll % HEALTH == 0 or self._poke.is_set():
            self._poke.clear()
            status, _ = await self._client.get("/health")
            if status >= 500:
                raise Unusable(f"it answers {status} to GET /health")
        if poll % LISTING == 0:
            main, found = await self._list()
            if self.description is None or main.id != self.description.model:
                raise Unusable("it serves another model now")
            self.names = probe.names(found, main)

    async def _list(self) -> tuple[probe.Card, list[probe.Card]]:
        """Its model, and all that it lists. Raises Unusable."""
        status, body = await self._client.get("/v1/models")
        if status in (401, 403):
            raise Unusable(
                f"it answers {status} to GET /v1/models: name the variable that has its key, "
                "--upstream URL,api_key_env=VARIABLE"
            )
        found = probe.cards(body) if status == 200 else []
        main = probe.main_card(found, self._models)
        if main is None:
            raise Unusable(f"it answers {status} to GET /v1/models, and lists no model")
        return main, found

    async def _find_figures(self) -> Figures | None:
        for self._source in ("/metrics", "/load"):
            if figures := await self._read_figures(self._source):
                return figures
        self._source = ""
        return None

    async def _read_figures(self, path: str) -> Figures | None:
        status, body = await self._client.get(path)
        if status != 200:
            return None
        return from_metrics(body) if path == "/metrics" else from_load(body)

    def _cache(self) -> tuple[int, int]:
        """Tokens of a block, and blocks of a rank, 0 where nobody says."""
        settings, figures = self._settings, self._figures or Figures()
        size = settings.block_size or figures.block_size or BLOCK_SIZE
        return size, settings.blocks or figures.blocks or figures.tokens // size

    def _report(self) -> None:
        """Its load: what it says, and what we know better."""
        self.problem = self._mismatch or self.watcher.problem
        figures, speed, ranks = self._figures, self._speed, len(self.holders)
        unbegun = sum(not exchange.began_at for exchange in self._open)
        others = max(0, figures.waiting - unbegun) if figures else 0
        _, blocks = self._cache()
        tokens = self.outstanding.ours + int(others * self._usual)
        self.load = Load(
            running=figures.running if figures else self.in_flight - unbegun,
            waiting=figures.waiting if figures else unbegun,
            outstanding_tokens=tokens,
            used_blocks=int((figures.usage if figures else 0.0) * blocks) * ranks,
            cached_blocks=self.watcher.blocks,
            total_blocks=blocks * ranks,
            step_s=speed.step_s,
            prefill_s_per_token=speed.prefill_s_per_token,
        )
        self.outstanding.reported(tokens)
        self._changed(self)

    def _disconnected(self, reason: str) -> None:
        if self.state is State.READY:
            event(log, "upstream lost", upstream=self.replica_id, reason=reason)
        elif reason != self.problem:
            event(log, "upstream not reached", upstream=self.replica_id, reason=reason)
        self.state, self.reported_state, self.problem = State.CONNECTING, "", reason
        self.load = None
        self._changed(self)
        for exchange in list(self._open):
            exchange.lose(reason)
        self.watcher.forget()


class _Open:
    """A request that has not ended. `prefill_s` is what its prefill took, once that is known."""

    def __init__(
        self,
        ticket: int,
        forward: Forward,
        began: Callable[[], None],
        ended: Callable[[Exchange], None],
    ) -> None:
        self.ticket = ticket
        self.forward = forward
        self.began = began
        self.ended = ended
        self.prefill_s = 0.0
        self.timer: asyncio.TimerHandle | None = None


def _mismatch(model: str, known: bool, differ: list[str] | None) -> str:
    if not known:
        return f"it serves {model!r}, which this router does not know: requests go by load alone"
    if differ:
        return f"it makes other token ids of {', '.join(differ)} than this router"
    return ""
