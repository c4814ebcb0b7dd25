"""Several routes of one request as one: opened together, read together, ended together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from hotbranch.keys import TOKEN_BYTES
from hotbranch.v1.serve_pb2 import Delta, Sampling
from router.generation import Dispatcher, Prompt, Route

Step = Sequence[tuple[int, Delta]]  # (choice of the whole request, delta)


class Relay:
    """The routes of a request, `n` choices each; choice j of prompt i has index i * n + j."""

    def __init__(self, routes: Sequence[Route], prompts: Sequence[Prompt], n: int) -> None:
        self.routes = routes
        self.choices = len(routes) * n
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts) // TOKEN_BYTES
        self.completion_tokens = 0
        self._n = n

    @classmethod
    async def open(
        cls,
        dispatcher: Dispatcher,
        prompts: Sequence[Prompt],
        samplings: Sequence[Sequence[Sampling]],
    ) -> "Relay":
        """Place every prompt; when one cannot be placed, none stays. Raises as the dispatcher."""
        if len(prompts) == 1:
            return cls(
                [await dispatcher.open(prompts[0], samplings[0])],
                prompts,
                len(samplings[0]),
            )
        opening = [
            asyncio.ensure_future(dispatcher.open(prompt, wanted))
            for prompt, wanted in zip(prompts, samplings, strict=True)
        ]
        try:
            routes = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            for result in await asyncio.gather(*opening, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result.cancel()
            raise
        return cls(routes, prompts, len(samplings[0]))

    @property
    def cached_tokens(self) -> list[int | None]:
        return [route.cached_tokens for route in self.routes]

    async def steps(self) -> AsyncGenerator[Step, None]:
        """What each engine step brought, as it comes, until every choice has finished."""
        if len(self.routes) == 1:
            async for deltas in self.routes[0].deltas():
                yield self._counted(deltas)
            return
        arrived: asyncio.Queue[Step | BaseException | None] = asyncio.Queue(maxsize=1)
        readers = [
            asyncio.create_task(self._read(i, route, arrived))
            for i, route in enumerate(self.routes)
        ]
        try:
            unfinished = len(readers)
            while unfinished:
                step = await arrived.get()
                if step is None:
                    unfinished -= 1
                elif isinstance(step, BaseException):
                    raise step
                else:
                    yield self._counted(step)
        finally:
            for reader in readers:
                reader.cancel()

    def cancel(self) -> None:
        """Cancel what still runs."""
        for route in self.routes:
            route.cancel()

    def _counted(self, step: Step) -> Step:
        for _, delta in step:
            self.completion_tokens += len(delta.token_ids) // TOKEN_BYTES
        return step

    async def _read(
        self,
        i: int,
        route: Route,
        arrived: "asyncio.Queue[Step | BaseException | None]",
    ) -> None:
        try:
            async for deltas in route.deltas():
                await arrived.put([(i * self._n + choice, delta) for choice, delta in deltas])
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)
