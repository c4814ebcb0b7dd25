"""One prompt on one replica: deltas in from the link, out to the API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from hotbranch.keys import TOKEN_BYTES
from hotbranch.v1.serve_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    Delta,
    Rejection,
)
from router.fleet.link import Link
from router.fleet.member import Lost

# A cancelled request that we did not cancel, or the link would not deliver it, was given up too.
_GAVE_UP = (FINISH_REASON_CANCELLED, FINISH_REASON_ERROR)


class Rejected(Exception):
    """The replica refused the prompt; `reason` is a Rejection.Reason."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.reason = rejection.reason


class LiveRoute:
    """Implements `router.generation.Route` and the link's Receiver.

    `on_close` is called exactly once, when the last choice has finished, failed or been cancelled,
    with the tokens that all choices together were sent.
    """

    def __init__(
        self,
        link: Link,
        choices: int,
        predicted_tokens: int,
        on_close: Callable[[int], None],
    ) -> None:
        self.replica_id = link.replica_id
        self.predicted_tokens = predicted_tokens
        self.cached_tokens: int | None = None
        self.tickets: list[int] = []
        self._link = link
        self._unfinished = set(range(choices))
        self._on_close = on_close
        self._steps: list[Sequence[tuple[int, Delta]]] = []
        self._began = False
        self._generated = 0
        self._failure: Lost | Rejected | None = None
        self._wake = asyncio.Event()

    def deliver(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        for choice, delta in deltas:
            if delta.finish in _GAVE_UP:
                if not self._began and not delta.token_ids:
                    self._lose(Lost(delta.error or "the replica gave the request up"))
                    return
                delta.finish = FINISH_REASON_ERROR
            self._generated += len(delta.token_ids) // TOKEN_BYTES
            if choice == 0 and delta.HasField("cached_tokens"):
                self.cached_tokens = delta.cached_tokens
            if delta.finish:
                self._unfinished.discard(choice)
        self._began = True
        self._steps.append(deltas)
        self._wake.set()
        if not self._unfinished:
            self._close()

    def reject(self, choice: int, rejection: Rejection) -> None:
        if self._began:
            self._fail([choice], rejection.message)
        else:
            self._lose(Rejected(rejection))

    def lost(self, reason: str) -> None:
        if self._began:
            self._fail(sorted(self._unfinished), f"the replica was lost: {reason}")
        else:
            self._lose(Lost(reason))

    def cancel(self) -> None:
        self._link.cancel(self.tickets)
        self._unfinished.clear()
        self._wake.set()
        self._close()

    async def begun(self) -> None:
        """Return once the first delta is there. Raises Lost or Rejected."""
        await self._wake.wait()
        if self._failure:
            raise self._failure

    async def deltas(self) -> AsyncIterator[Sequence[tuple[int, Delta]]]:
        try:
            while self._steps or self._unfinished:
                await self._wake.wait()
                self._wake.clear()
                steps, self._steps = self._steps, []
                for step in steps:
                    yield step
        finally:
            if self._unfinished:
                self.cancel()

    def _lose(self, failure: Lost | Rejected) -> None:
        """The prompt can be placed again; whatever else of it is open is cancelled."""
        self._failure = failure
        self.cancel()

    def _fail(self, choices: Sequence[int], message: str) -> None:
        self.deliver([(c, Delta(finish=FINISH_REASON_ERROR, error=message)) for c in choices])

    def _close(self) -> None:
        on_close, self._on_close = self._on_close, _nothing
        on_close(self._generated)


def _nothing(generated: int) -> None:
    pass
