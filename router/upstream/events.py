"""The KV events of one data-parallel rank, as changes to what it is known to hold.

Events make a view exact only from a beginning on: the first event of an engine, or one that says
that all is gone. Who comes later, and cannot have all before it replayed, knows nothing until there
is such a beginning.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from hotbranch.kv_events.decode import Batch
from hotbranch.kv_events.subscribe import Subscription
from hotbranch.kv_events.translate import Changes, StoredRun, Translator
from hotbranch.log import event
from router.fleet.holder import Holder
from router.index.tree import Inconsistent

log = logging.getLogger(__name__)

# kinds of `router.index.view.RECOVERIES`, by a subscription's reasons
KINDS = {"late": "late", "gap": "gap", "restart": "epoch", "malformed": "inconsistent"}


class Told(Protocol):
    """Hears what a rank holds. `change` raises Inconsistent, and follows an `exact`."""

    def exact(self, holder: Holder, runs: Sequence[StoredRun], /) -> None:
        """It holds these blocks, and what changes is told from now on."""

    def change(self, holder: Holder, changes: Changes, /) -> None: ...

    def lost(self, holder: Holder, kind: str, /) -> None:
        """What it holds is not known any more, until the next `exact`."""


class Events:
    """Follows one publisher until it is closed. `model` names the namespace, blocks have
    `block_size` tokens. `heard_at` is when the last event came, of a monotonic clock, or 0.0."""

    def __init__(
        self,
        holder: Holder,
        endpoint: str,
        replay: str | None,
        topic: str,
        model: str,
        block_size: int,
        told: Told,
    ) -> None:
        self.heard_at = 0.0
        self.of = model, block_size
        self._holder = holder
        self._told = told
        self._size = block_size
        self._translator = Translator(model, block_size)
        self._exact: bool | None = None  # None: its first event will tell
        self._doubtful = False
        subscription = Subscription(endpoint, replay, topic, self._received, self._lost)
        self._task = asyncio.create_task(self._run(subscription), name=f"events {endpoint}")

    @property
    def blocks(self) -> int:
        """Blocks that the rank holds, copies included; 0 while that is not known."""
        return self._translator.blocks if self._exact else 0

    @property
    def problem(self) -> str:
        """What is wrong, or nothing."""
        if self._translator.ignored["block_size"] and not self._translator.blocks:
            return f"its KV events are not about blocks of {self._size} tokens: give block_size"
        return ""

    def away(self) -> None:
        """The server is out of reach: its engine may be another one when it comes back."""
        self._doubtful = True

    def back(self, same: bool) -> None:
        """It is reached again; `same`: surely as the process that it was."""
        if self._doubtful and not same and self._exact:
            self._exact = False  # it may have begun anew, and told nothing yet
            self._translator.clear()
        self._doubtful = False
        if self._exact:
            self._told.exact(self._holder, self._translator.snapshot())

    def close(self) -> None:
        self._task.cancel()

    async def _run(self, subscription: Subscription) -> None:
        try:
            await subscription.run()
        except Exception as error:
            event(log, "KV events failed", logging.ERROR, error, upstream=self._holder.replica)
            self._lost("malformed")

    def _received(self, batch: Batch) -> None:
        self.heard_at = time.monotonic()
        changes = self._translator.apply(batch)
        if self._exact:
            try:
                self._told.change(self._holder, changes)
            except Inconsistent:
                self._lost("malformed")
        elif self._exact is None or changes.cleared:
            self._exact = True
            self._told.exact(self._holder, self._translator.snapshot())

    def _lost(self, reason: str) -> None:
        self._translator.clear()
        self._exact = None if reason == "restart" else False
        if reason == "restart":
            self._doubtful = False
        event(log, "KV events lost", upstream=self._holder.replica, reason=reason)
        self._told.lost(self._holder, KINDS[reason])
