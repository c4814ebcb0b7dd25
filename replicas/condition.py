"""The state of a replica, as its description tells it: from loading the engine to its end."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import grpc

from hotbranch.v1 import replica_pb2 as pb
from replicas.engine import Engine, Fault, StartError

STATES = {
    Fault.MODEL_NOT_FOUND: pb.STATE_MODEL_NOT_FOUND,
    Fault.OUT_OF_MEMORY: pb.STATE_OUT_OF_MEMORY,
    Fault.BAD_SETTINGS: pb.STATE_START_FAILED,
    Fault.START_FAILED: pb.STATE_START_FAILED,
}
UNLOADED = frozenset({pb.STATE_LOADING, *STATES.values()})  # there is no engine
SICK = frozenset({pb.STATE_DEAD, pb.STATE_HUNG})

LOADING = "the engine is loading"

Answer = tuple[grpc.StatusCode, str]  # OK, or why not
DONE: Answer = (grpc.StatusCode.OK, "")

T = TypeVar("T")


async def wait(future: Future[T]) -> T:
    """Wait for the engine. Shielded: an engine need not expect that its futures are cancelled."""
    return await asyncio.shield(asyncio.wrap_future(future))


class Condition:
    """Keeps `state` and `problem` of a description true.

    An engine that says so is dead. One hangs that has ended no step for `step_timeout_s` though
    requests were open all the time; `count_open` tells how many are. Times are the loop's.
    """

    def __init__(
        self, description: pb.Description, step_timeout_s: float, count_open: Callable[[], int]
    ) -> None:
        self.description = description
        self._step_timeout_s = step_timeout_s
        self._count_open = count_open
        self._engine: Engine | None = None
        self._asleep = False
        self._trouble = ""  # why it did not wake
        self._moved = 0.0  # when a step ended, or nothing was open
        self._turning = asyncio.Lock()  # held while it falls asleep or wakes

    @property
    def sick(self) -> bool:
        return self.description.state in SICK

    def attach(self, engine: Engine, now: float) -> None:
        """The engine is there."""
        self._engine = engine
        self.look(now)

    def fail(self, error: StartError) -> None:
        """There will be no engine."""
        self._tell(STATES[error.fault], str(error))

    def stepped(self, now: float) -> None:
        """The engine has ended a step."""
        self._moved = now

    def look(self, now: float) -> None:
        """Bring the state up to date; to be called again and again."""
        if self._engine is None:
            return
        count = self._count_open()
        if not count:
            self._moved = now
        if dead := self._engine.healthy():
            self._tell(pb.STATE_DEAD, dead)
        elif now - self._moved >= self._step_timeout_s:
            problem = f"no step has ended for {self._step_timeout_s:g} s, {count} requests are open"
            self._tell(pb.STATE_HUNG, problem)
        else:
            self._tell_well()

    async def sleep(self, discard_weights: bool) -> Answer:
        """Have the engine sleep, if it does not yet. One that fails to stays awake.

        To be run to its end: what is half done would leave the state unknown.
        """
        async with self._turning:
            if self._asleep:
                return DONE
            engine, unfit = self._fit()
            if engine is None:
                return unfit
            if count := self._count_open():
                return grpc.StatusCode.FAILED_PRECONDITION, f"{count} requests are open"
            asleep = engine.sleep(discard_weights)
            if asleep is None:
                return self._cannot_sleep()
            self._asleep = True
            self._tell_well()  # at once, so that nothing is submitted
            try:
                await wait(asleep)
            except Exception as error:
                self._asleep = False
                self._tell_well()
                return grpc.StatusCode.INTERNAL, f"it cannot sleep: {error}"
            return DONE

    async def wake(self) -> Answer:
        """Have the engine wake. One that fails to sleeps on, and says why. To be run to its end."""
        async with self._turning:
            engine, unfit = self._fit()
            if engine is None:
                return unfit
            awake = engine.wake()
            if awake is None:
                return self._cannot_sleep()
            try:
                await wait(awake)
            except Exception as error:
                self._trouble = f"it cannot wake: {error}"
                self._tell_well()
                return grpc.StatusCode.INTERNAL, self._trouble
            self._asleep, self._trouble = False, ""
            self._tell_well()
            return DONE

    def _fit(self) -> tuple[Engine | None, Answer]:
        """The engine, where there is one and it is not sick."""
        here = self.description
        if self._engine is None or self.sick:
            return None, (grpc.StatusCode.UNAVAILABLE, here.problem or LOADING)
        return self._engine, DONE

    def _cannot_sleep(self) -> Answer:
        engine = self.description.engine
        return grpc.StatusCode.UNIMPLEMENTED, f"the {engine} engine cannot sleep"

    def _tell_well(self) -> None:
        if self._asleep:
            self._tell(pb.STATE_ASLEEP, self._trouble)
        else:
            self._tell(pb.STATE_SERVING, "")

    def _tell(self, state: pb.State, problem: str) -> None:
        self.description.state, self.description.problem = state, problem
