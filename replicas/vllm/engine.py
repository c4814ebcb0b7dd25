"""vLLM as the engine: requests and events pass between its event loop and the replica's.

vLLM's core runs in a process of its own. Here is a thread with an event loop, which holds what
waits, hands it over in the order of the radix engine, and tells what each step brought.
"""

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvloop
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from hotbranch.kv_events.decode import Batch
from hotbranch.kv_events.subscribe import Subscription
from replicas.engine import (
    EvictedRun,
    Facts,
    Finish,
    Load,
    Namespace,
    Output,
    Request,
    Step,
    StoredRun,
)
from replicas.radix.waiting import Policy
from replicas.vllm.admission import OVERDUE, Admitted, Room
from replicas.vllm.parsing import Parsers, Parsing
from replicas.vllm.pins import Pin
from replicas.vllm.rank import Rank, Stepped, total
from replicas.vllm.sampling import FINISHES, to_logprobs, to_params

STOP_S = 3.0  # for vLLM's processes to end

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that has not ended. `told` once its first output was made."""

    request: Request
    rank: Rank
    params: SamplingParams
    parsing: Parsing | None
    told: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """Who goes next of those that wait."""

    policy: Policy
    starvation_s: float


@dataclass(slots=True)
class _Pending:
    """What the next step will tell."""

    outputs: list[Output] = field(default_factory=list)
    stepped: bool = False
    scheduled: bool = False


class VllmEngine:
    """An `Engine` (see replicas.engine) over `AsyncLLM`.

    `open` makes the AsyncLLM, on the engine's event loop; what it raises, the constructor raises.
    `closed` is called once vLLM has ended.
    """

    def __init__(
        self,
        open: Callable[[Callable[[Stepped], None]], AsyncLLM],
        model: str,
        order: Order,
        adapters: Sequence[LoRARequest],
        parsers: Callable[[AsyncLLM], Parsers | None],
        closed: Callable[[], None],
    ) -> None:
        self._model = model
        self._closed = closed
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self._loop = uvloop.new_event_loop()
        self._emit: Callable[[Step], None] = lambda _step: None
        self._streams: dict[int, _Stream] = {}
        self._pending = _Pending()
        self._step = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ranks: list[Rank] = []
        self._failure = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(open, order, parsers), self._loop)
        try:
            opening.result()
        except BaseException:
            self._post(self._loop.stop)
            self._thread.join()
            raise

    # From any thread

    def start(self, emit: Callable[[Step], None]) -> None:
        self._emit = emit

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._post(self._end_all)
        self._thread.join()
        self._closed()

    def submit(self, request: Request) -> None:
        self._post(self._submit, request)

    def cancel(self, id: int) -> None:
        self._post(self._cancel, id)

    def snapshot(self, reply: Callable[[Sequence[StoredRun]], None]) -> None:
        self._post(self._snapshot, reply)

    def pin(self, namespace: Namespace, prompt: bytes, ttl_s: float) -> "Future[int | None]":
        return self._call(self._pin(namespace, prompt, ttl_s))

    def unpin(self, namespace: Namespace, prompt: bytes) -> "Future[int]":
        return self._call(self._unpin(namespace, prompt))

    def flush(self) -> "Future[None]":
        return self._call(self._flush())

    def sleep(self, discard_weights: bool) -> "Future[None] | None":
        return self._call(self._sleep(2 if discard_weights else 1)) if self._sleeps else None

    def wake(self) -> "Future[None] | None":
        return self._call(self._wake()) if self._sleeps else None

    def load(self) -> Load:
        return self._load

    def healthy(self) -> str:
        if self._llm.errored and not self._stopping:
            return self._failure or "vLLM's engine died"
        return self._failure

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _call(self, work: "Coroutine[Any, Any, Any]") -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # On the engine's loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _open(
        self,
        open: Callable[[Callable[[Stepped], None]], AsyncLLM],
        order: Order,
        parsers: Callable[[AsyncLLM], Parsers | None],
    ) -> None:
        self._llm = llm = open(self._stepped)
        try:
            self._parsers = parsers(llm)
        except BaseException:
            llm.shutdown(STOP_S)
            raise
        config = llm.vllm_config
        cache, ranks = config.cache_config, config.parallel_config.data_parallel_size
        blocks = (cache.num_gpu_blocks or 1) - 1  # vLLM keeps one empty
        chunk = config.scheduler_config.max_num_batched_tokens
        self._sleeps = config.model_config.enable_sleep_mode
        self.facts = Facts(
            engine="vllm",
            block_size=cache.block_size,
            capacity_blocks=blocks,
            max_context=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            ranks=ranks,
            chunk_tokens=chunk,
            adapters=tuple(self._adapters),
            structures=True,
            parses=self._parsers is not None,
        )
        room = Room(blocks, chunk, config.scheduler_config.max_num_seqs)
        for number in range(ranks):
            rank = Rank(
                number, self._model, cache.block_size, room, order.policy, order.starvation_s
            )
            self._ranks.append(rank)
        self._load = total([rank.load() for rank in self._ranks])
        for number, source in llm.get_kv_event_sources().items():
            self._listen(self._ranks[number], source.endpoint, source.replay_endpoint)

    def _listen(self, rank: Rank, endpoint: str, replay: str | None) -> None:
        def received(batch: Batch) -> None:
            rank.received(batch)
            self._schedule()

        def lost(reason: str) -> None:
            logger.warning("cache events of rank %d were lost (%s)", rank.number, reason)
            self._spawn(self._flush())

        subscription = Subscription(endpoint, replay, "", received, lost)
        self._spawn(subscription.run())

    def _spawn(self, work: "Coroutine[Any, Any, None]") -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the engine failed", exc_info=error)
            self._failure = f"engine broke: {error!r}"

    def _submit(self, request: Request) -> None:
        try:
            params = to_params(request.sampling)
            parsing = self._parsers.open(request, params) if self._parsers else None
        except ValueError as error:
            self._refuse(request.id, error)
            return
        rank = self._ranks[request.rank]
        self._streams[request.id] = _Stream(request, rank, params, parsing)
        rank.admission.add(request, self._loop.time())
        self._pump(rank)

    def _pump(self, rank: Rank) -> None:
        """Hand over what vLLM has use for, and touch what is pinned."""
        if self._stopping:
            return
        now = self._loop.time()
        for pin in rank.pins.due(rank.used_blocks, now):
            self._spawn(self._touch(rank, pin))
        while (admitted := rank.admission.next(rank.used_blocks, now)) is not None:
            stream = self._streams[admitted.work.sequence.request.id]
            stream.task = self._spawn(self._generate(stream, admitted))

    async def _generate(self, stream: _Stream, admitted: Admitted) -> None:
        request, rank = stream.request, stream.rank
        try:
            outputs = self._llm.generate(
                _prompt(request.prompt, request.namespace),
                stream.params,
                str(request.id),
                lora_request=self._adapters.get(request.namespace.adapter),
                priority=admitted.priority,
                data_parallel_rank=rank.number if len(self._ranks) > 1 else None,
                **(stream.parsing.arguments if stream.parsing else {}),
            )
            async for output in outputs:
                self._advance(stream, output)
        except VLLMClientError as error:
            self._refuse(request.id, error)
        except EngineDeadError:
            self._give_up(request.id, Finish.ERROR, "vLLM's engine died")
        except Exception as error:
            logger.exception("a request failed in vLLM")
            self._give_up(request.id, Finish.ERROR, f"vLLM failed: {type(error).__name__}")
        finally:
            self._release(stream)

    def _advance(self, stream: _Stream, output: RequestOutput) -> None:
        """Say what a step did to one request."""
        id = stream.request.id
        if id not in self._streams:
            return  # cancelled meanwhile
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        told = self._output(stream)
        if not stream.told:
            told.cached_tokens, stream.told = output.num_cached_tokens, True
        stream.rank.admission.generated(id, len(tokens))
        told.tokens, told.text = tokens, completion.text
        told.logprobs = to_logprobs(tokens, completion.logprobs, stream.params.logprobs)
        if completion.finish_reason is not None:
            told.finish = FINISHES[completion.finish_reason]
            reason = completion.stop_reason
            told.stop_reason = reason if isinstance(reason, str) else ""
            if told.finish == Finish.ERROR:
                told.error = "vLLM gave the request up"
        if stream.parsing is not None:
            stream.parsing.push(told)
        if told.finish is not None:
            del self._streams[id]
            self._release(stream)

    def _output(self, stream: _Stream) -> Output:
        output = Output(stream.request.id, [], "")
        self._pending.outputs.append(output)
        self._schedule()
        return output

    def _refuse(self, id: int, error: Exception) -> None:
        """A request can never run as it is."""
        self._streams.pop(id, None)
        message = " ".join(str(error).split())
        output = Output(id, [], "", Finish.ERROR, error=message, refused=True)
        self._pending.outputs.append(output)
        self._schedule()

    def _cancel(self, id: int) -> None:
        if (stream := self._streams.get(id)) is not None:
            self._give_up(id, Finish.CANCELLED)
            if stream.task is not None:
                stream.task.cancel()
            else:
                self._release(stream)

    def _give_up(self, id: int, finish: Finish, error: str = "") -> None:
        """End a request from outside vLLM; unknown and finished ids are ignored."""
        if (stream := self._streams.get(id)) is not None:
            output = self._output(stream)
            output.finish, output.error = finish, error
            del self._streams[id]

    def _release(self, stream: _Stream) -> None:
        """It is not in vLLM, nor waits for it, any more."""
        if stream.rank.admission.end(stream.request.id):
            self._schedule()
            self._pump(stream.rank)

    async def _touch(self, rank: Rank, pin: Pin) -> None:
        """Use a pinned prefix, so that vLLM evicts others first."""
        # One token more than the prefix: vLLM computes the last token anew in any case.
        prompt = pin.tokens + pin.tokens[:4]
        try:
            outputs = self._llm.generate(
                _prompt(prompt, pin.namespace),
                SamplingParams(max_tokens=1, temperature=0, detokenize=False),
                f"pin-{id(pin)}-{pin.seen}",
                lora_request=self._adapters.get(pin.namespace.adapter),
                priority=OVERDUE,
                data_parallel_rank=rank.number if len(self._ranks) > 1 else None,
            )
            async for _ in outputs:
                pass
        except EngineDeadError:
            pass
        finally:
            rank.pins.touched(pin)

    def _stepped(self, step: Stepped) -> None:
        """vLLM has ended a step; what it brought for the requests is told in this turn, too."""
        rank = self._ranks[step.rank]
        rank.stepped(step)
        self._pending.stepped = True
        self._schedule()
        self._loop.call_soon(self._pump, rank)

    def _schedule(self) -> None:
        """Publish behind whatever is ready to run now, so that a step is told in one piece."""
        if not self._pending.scheduled:
            self._pending.scheduled = True
            self._loop.call_soon(self._publish)

    def _publish(self) -> None:
        pending, self._pending = self._pending, _Pending()
        changes = [rank.drain() for rank in self._ranks]
        self._load = total([rank.load() for rank in self._ranks])
        if any(change.wiped for change in changes):
            # An epoch is all ranks': what the others hold is told again.
            stored: list[StoredRun] = [run for rank in self._ranks for run in rank.snapshot()]
            evicted: list[EvictedRun] = []
            wiped = True
        else:
            stored = [run for change in changes for run in change.stored]
            evicted = [run for change in changes for run in change.evicted]
            wiped = False
        if pending.stepped or pending.outputs or stored or evicted or wiped:
            self._step += 1
            step = Step(self._step, pending.outputs, stored, evicted, self._load, wiped)
            self._emit(step)

    def _snapshot(self, reply: Callable[[Sequence[StoredRun]], None]) -> None:
        self._publish()
        reply([run for rank in self._ranks for run in rank.snapshot()])

    async def _pin(self, namespace: Namespace, prompt: bytes, ttl_s: float) -> int | None:
        now = self._loop.time()
        pinned = [rank.pins.pin(namespace, prompt, ttl_s, now) for rank in self._ranks]
        if None in pinned:
            await self._unpin(namespace, prompt)
            return None
        return max(count for count in pinned if count is not None)

    async def _unpin(self, namespace: Namespace, prompt: bytes) -> int:
        return max(rank.pins.unpin(namespace, prompt) for rank in self._ranks)

    async def _flush(self) -> None:
        """Empty vLLM's cache. What runs is computed anew from its tokens: vLLM resets all or
        nothing."""
        await self._emptied(self._llm.reset_prefix_cache(reset_running_requests=True))

    async def _sleep(self, level: int) -> None:
        await self._emptied(self._llm.sleep(level))

    async def _wake(self) -> None:
        await self._llm.wake_up()

    async def _emptied(self, demand: Coroutine[Any, Any, Any]) -> None:
        """Tell at once that nothing is cached, and take that back where vLLM refuses the demand."""
        for rank in self._ranks:
            rank.reset()
        self._publish()
        try:
            await demand
        except BaseException:
            for rank in self._ranks:
                rank.reset_refused()
            self._publish()
            raise

    def _end_all(self) -> None:
        self._stopping = True
        for id in list(self._streams):
            self._give_up(id, Finish.CANCELLED)
        self._publish()
        self._loop.create_task(self._shut_down())

    async def _shut_down(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._llm.shutdown(STOP_S)
        self._loop.stop()


def _prompt(prompt: bytes, namespace: Namespace) -> Any:
    return tokens_input(array("I", prompt).tolist(), cache_salt=namespace.salt or None)
