"""The request router that Ray Serve is told to use for a deployment (docs/ray_llm.md).

Ray makes one in every process that calls the deployment, and runs all of its methods on one event
loop. It pickles what is in this module by value. An exception in `initialize_state` or
`choose_replicas` leaves requests waiting for ever: what goes wrong here costs a request its
affinity, and nothing else.
"""

import asyncio
import logging
import time
from collections import Counter
from weakref import WeakKeyDictionary, WeakValueDictionary

from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from ray.util import metrics

from deploy.ray_llm.placer import Placer, Sent
from deploy.ray_llm.prompts import Prompt, Reader, Unread
from hotbranch.load_settings import SettingsError, load_settings
from hotbranch.settings import RayLlmSettings
from router.schedule.job import Job

log = logging.getLogger("ray.serve")  # which Ray's processes show


class HotbranchRouter(MultiplexMixin, RequestRouter):
    """Places a request by what replicas hold of its prompt and by what they have to do.

    `placements` counts choices by their reason, `degraded` requests whose prompt could not be read
    as the model does, or not at all.
    """

    def initialize_state(self, **kwargs: object) -> None:
        """`kwargs` are fields of RayLlmSettings. Where one is wrong, all are the defaults."""
        try:
            settings = load_settings(RayLlmSettings, kwargs, environ={})
        except SettingsError as error:
            log.error(f"hotbranch: request_router_kwargs are not used: {error}")
            settings = RayLlmSettings()
        self.placements, self.degraded = Counter[str](), Counter[str]()
        self._model = settings.model
        self._reader: asyncio.Task[Reader] | None = None
        self._placer = Placer(settings)
        self._sent: WeakKeyDictionary[asyncio.Future[RunningReplica], Sent] = WeakKeyDictionary()
        self._asking: WeakValueDictionary[int, PendingRequest] = WeakValueDictionary()
        tags = {"deployment": self._deployment_id.name, "application": self._deployment_id.app_name}
        self._counters = {
            name: metrics.Counter(
                f"hotbranch_{name}", description=description, tag_keys=("reason", *tags)
            ).set_default_tags(tags)
            for name, description in {
                "placements": "Choices of a replica, by reason.",
                "degraded": "Requests whose prompt could not be read, by reason.",
            }.items()
        }

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas that may have the request, one to a rank."""
        if pending_request is None:
            return [candidate_replicas]
        sent = self._sent.get(pending_request.future)
        job = sent.job if sent else await self._read(pending_request)
        if sent:  # no replica took it, and it waits
            self._placer.take_back(sent, time.monotonic())
        replicas = self._eligible(pending_request)
        if not replicas:  # they have gone meanwhile
            return []
        lengths = self.replica_queue_len_cache
        ongoing = {name: lengths.get(one.replica_id) or 0 for name, one in replicas.items()}
        names, reason = self._placer.rank(job, ongoing, time.monotonic())
        if not sent:
            self._count("placements", reason)
            pending_request.future.add_done_callback(self._decided)
        self._asking[id(pending_request.metadata)] = pending_request
        self._send(pending_request, job, names[0])
        return [[replicas[name]] for name in names]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are all there are."""
        old, new = set(self._replica_id_set), {replica.replica_id for replica in replicas}
        for id in old - new:
            self._placer.remove(id.unique_id)
        for id in new - old:
            self._placer.add(id.unique_id)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """One of them is dead, which Ray's controller may not know yet."""
        super().on_replica_actor_died(replica_id)
        self._placer.remove(replica_id.unique_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """The replica has accepted it."""
        self._placer.accepted(replica_id.unique_id, pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, failed, been cancelled, or been refused."""
        self._placer.ended(replica_id.unique_id, internal_request_id, time.monotonic())

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give a replica to the request that it was chosen for.

        Ray looks that up by an id, which all calls that one HTTP request makes have in common, and
        leaves all of them but one waiting for ever. It shall find the right one.
        """
        pending = self._asking.get(id(request_metadata))
        if pending is not None and not pending.future.done():
            self._pending_requests_by_id[pending.metadata.internal_request_id] = pending
            sent, name = self._sent.get(pending.future), replica.replica_id.unique_id
            if sent and sent.replica != name:
                self._placer.take_back(sent, time.monotonic())
                self._send(pending, sent.job, name)
        super()._fulfill_next_pending_request(replica, request_metadata)

    async def _read(self, pending: PendingRequest) -> Job:
        """A job for its prompt. Tokenising is left to a thread."""
        prompt: Prompt | None = None
        try:
            if self._reader is None:
                self._reader = asyncio.create_task(asyncio.to_thread(_load, self._model))
            reader = await asyncio.shield(self._reader)
            adapter = pending.metadata.multiplexed_model_id
            prompt = await asyncio.to_thread(reader.read, pending.args, pending.kwargs, adapter)
            if prompt.degraded:
                self._count("degraded", prompt.degraded)
        except Unread as unread:
            self._count("degraded", unread.reason)
        except Exception as error:  # whatever it is; its message may quote the prompt
            id, kind = pending.metadata.request_id, type(error).__name__
            log.error(f"hotbranch: the prompt of request {id} cannot be read: {kind}")
            self._count("degraded", "error")
        return self._placer.job(prompt, time.monotonic())

    def _eligible(self, pending: PendingRequest) -> dict[str, RunningReplica]:
        """By name. Of a LoRA adapter those that Ray has it on, or wants it on."""
        ids = self._replica_id_set
        if pending.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending)
        pending.routing_context.should_backoff = True  # else Ray spins while all are full
        return {id.unique_id: self._replicas[id] for id in ids if id in self._replicas}

    def _send(self, pending: PendingRequest, job: Job, name: str) -> None:
        request, now = pending.metadata.internal_request_id, time.monotonic()
        self._sent[pending.future] = self._placer.send(job, name, request, now)

    def _decided(self, future: "asyncio.Future[RunningReplica]") -> None:
        """A request has a replica, or nobody waits for it any more."""
        sent = self._sent.pop(future, None)
        if sent and future.cancelled():
            self._placer.take_back(sent, time.monotonic())

    def _count(self, name: str, reason: str) -> None:
        {"placements": self.placements, "degraded": self.degraded}[name][reason] += 1
        self._counters[name].inc(tags={"reason": reason})


def _load(model: str) -> Reader:
    """The reader of a model; of texts where it has no usable tokenizer."""
    try:
        return Reader.load(model)
    except Exception as error:  # a model's files can be wrong in any way
        log.error(f"hotbranch: model {model!r} is not used, texts are compared instead: {error}")
        return Reader(None)
