"""From a tokenised prompt to a replica that generates: keys, match, place, predict, submit."""

import logging
import time
from collections.abc import Sequence
from statistics import median

from hotbranch.keys import TOKEN_BYTES, root
from hotbranch.log import event
from hotbranch.v1.serve_pb2 import Rejection, Sampling, Submit
from router.fleet.fleet import Fleet
from router.fleet.holder import Holder
from router.fleet.link import Link
from router.generation import Prompt, Refused, Unavailable
from router.index.chains import KeyChains
from router.index.index import Index
from router.schedule.placement import Candidate, Placement, place
from router.schedule.route import LiveRoute, Lost, Rejected

log = logging.getLogger(__name__)

ATTEMPTS = 3
PREFILL_S_PER_TOKEN = 1e-4  # until some replica has measured its own
ALIKE = 2.0  # measured speeds within this factor of the typical one are the same speed


class PlacingDispatcher:
    """Implements `router.generation.Dispatcher` over the fleet and the index."""

    def __init__(self, fleet: Fleet, index: Index) -> None:
        self._fleet = fleet
        self._index = index
        self.chains = KeyChains()
        self.open_routes = 0
        self.retries = 0
        self.placements: dict[str, int] = {}

    async def open(self, prompt: Prompt, samplings: Sequence[Sampling]) -> LiveRoute:
        """Place one prompt; returns once the first delta is there. Raises Unavailable, Refused.

        A replica that goes, drains or is full before the first token costs one attempt; the prompt
        is then placed on another.
        """
        tried: set[str] = set()
        problem = Unavailable(f"no replica is ready for {prompt.model!r}")
        for _ in range(ATTEMPTS):
            links = [link for link in self._fleet.ready(prompt.model) if link.address not in tried]
            if not links:
                break
            if tried:
                self.retries += 1
                event(log, "retry", request_id=prompt.request_id, reason=str(problem))
            # where it fits nowhere, a replica says why
            links = [link for link in links if _fits(link, prompt)] or links
            link, holder, route, keys = self._dispatch(prompt, samplings, links)
            try:
                await route.begun()
                self._settle(holder, route, keys, _block_size(link))
                return route
            except Rejected as rejected:
                self._index.withdraw(holder, keys)
                if rejected.reason == Rejection.REASON_INVALID:
                    raise Refused(str(rejected)) from None
                full = rejected.reason == Rejection.REASON_OVERLOADED
                problem = Unavailable(str(rejected), overloaded=full)
            except Lost as lost:
                self._index.withdraw(holder, keys)
                problem = Unavailable(f"the replica was lost: {lost}")
            except BaseException:
                if route.cached_tokens is None:
                    self._index.withdraw(holder, keys)
                route.cancel()
                raise
            tried.add(link.address)
        raise problem

    def _dispatch(
        self, prompt: Prompt, samplings: Sequence[Sampling], links: Sequence[Link]
    ) -> tuple[Link, Holder, LiveRoute, list[int]]:
        now = time.monotonic()
        self._index.expire(now)
        tokens = len(prompt.token_ids) // TOKEN_BYTES
        seed = root(prompt.model, prompt.adapter, prompt.salt)
        placement, link, keys = self._place(prompt.token_ids, seed, links)
        matched, holder = placement.candidate.matched, placement.candidate.holder
        self.placements[placement.reason] = self.placements.get(placement.reason, 0) + 1
        self._index.predict(holder, keys, now)
        self.open_routes += 1
        route = LiveRoute(link, len(samplings), matched, self._closed)
        submits = [_submit(prompt, sampling, matched, holder.rank) for sampling in samplings]
        route.tickets = link.submit(submits, route, tokens - matched)
        event(
            log,
            "placed",
            severity=logging.DEBUG,
            request_id=prompt.request_id,
            replica=link.replica_id,
            rank=holder.rank,
            tokens=tokens,
            matched=matched,
            reason=placement.reason,
        )
        return link, holder, route, keys

    def _place(
        self, token_ids: bytes, seed: int, links: Sequence[Link]
    ) -> tuple[Placement, Link, list[int]]:
        tokens = len(token_ids) // TOKEN_BYTES
        by_address = {link.address: link for link in links}
        keys: dict[int, list[int]] = {}  # by block size
        candidates = []
        discriminator = seed
        typical = _typical_speed(links)
        for size in sorted({_block_size(link) for link in links}):
            keys[size] = self.chains.keys(token_ids, size, seed)
            alike = [link for link in links if _block_size(link) == size]
            match = self._index.match(keys[size])
            depths = match.depths()
            shared = min(depths.get(holder, 0) for link in alike for holder in link.holders)
            discriminator = keys[size][shared] if shared < len(keys[size]) else discriminator
            # one token is always computed, to have logits to sample from
            longest = (tokens - 1) // size
            candidates += [
                _candidate(link, holder, min(depths.get(holder, 0), longest) * size, typical)
                for link in alike
                for holder in link.holders
            ]
        placement = place(tokens, discriminator, candidates)
        link = by_address[placement.candidate.holder.replica]
        return placement, link, keys[_block_size(link)]

    def _settle(self, holder: Holder, route: LiveRoute, keys: Sequence[int], size: int) -> None:
        """The replica has said what it held: less than believed is taken back."""
        cached, now = route.cached_tokens, time.monotonic()
        if cached is not None and cached < route.predicted_tokens:
            self._index.missed(holder, keys, cached // size, now)
        self._index.computed(holder, keys, (cached or 0) // size, now)

    def _closed(self) -> None:
        self.open_routes -= 1


def _block_size(link: Link) -> int:
    assert link.description is not None, "a ready link is described"
    return link.description.block_size


def _fits(link: Link, prompt: Prompt) -> bool:
    """Whether the replica's context and pool have room for the prompt and a token behind it."""
    assert link.description is not None, "a ready link is described"
    pool = link.description.capacity_blocks * link.description.block_size
    room = min(link.description.max_context, pool or link.description.max_context)
    return len(prompt.token_ids) // TOKEN_BYTES < room


def _typical_speed(links: Sequence[Link]) -> float:
    """Prefill seconds a token, the median of what the replicas measured."""
    measured = [speed for link in links if link.load and (speed := link.load.prefill_s_per_token)]
    return median(measured) if measured else PREFILL_S_PER_TOKEN


def _candidate(link: Link, holder: Holder, matched: int, typical: float) -> Candidate:
    load = link.load
    speed = (load.prefill_s_per_token if load else 0) or typical
    # A replica judged slow gets no work and measures nothing new, so noise would last for ever:
    # only a different kind of machine counts as slower or faster.
    alike = typical / ALIKE <= speed <= typical * ALIKE
    return Candidate(
        holder=holder,
        matched=matched,
        # nobody says which rank it waits for
        outstanding=link.outstanding.tokens // len(link.holders),
        prefill_s_per_token=typical if alike else speed,
        step_s=load.step_s if load else 0.0,
        running=load.running if load else 0,
    )


def _submit(prompt: Prompt, sampling: Sampling, matched: int, rank: int) -> Submit:
    return Submit(
        request_id=prompt.request_id,
        model=prompt.model,
        adapter=prompt.adapter,
        salt=prompt.salt,
        token_ids=prompt.token_ids,
        sampling=sampling,
        priority=prompt.priority,
        deadline_s=prompt.deadline_s,
        predicted_tokens=matched,
        rank=rank,
    )
