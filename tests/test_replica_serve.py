"""Serve over the radix engine, with a real client on a real connection."""

import asyncio
import math
import struct
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from gated_replica import PATIENCE_S, VOCABULARY, Replica, busy, connect, eventually, replica
from replica_client import Client, endless, lost, submit

from hotbranch.v1.serve_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    Rejection,
    Sampling,
    Submit,
)
from replicas import streams
from replicas.engine import Output, Step
from replicas.radix.engine import RadixEngine


async def test_one_frame_a_step_with_all_its_deltas() -> None:
    async with replica() as here:
        client = Client(here)
        here.runner.gate.clear()
        here.runner.singly = True
        await client.send(submit(1), submit(2, range(50, 60)), submit(3, range(70, 80)))
        while not all(map(client.ended, (1, 2, 3))):
            here.runner.gate.set()
            await client.read_more()
        steps = [frame.step for frame in client.frames]
        assert steps == sorted(set(steps))
        assert max(len(frame.deltas) for frame in client.frames) == 3
        for ticket in (1, 2, 3):
            deltas = client.deltas(ticket)
            assert len(client.tokens(ticket)) == 4 * 4
            assert len("".join(delta.text for delta in deltas)) == 4
            assert [d.finish for d in deltas if d.finish] == [FINISH_REASON_LENGTH]
            assert [d.HasField("cached_tokens") for d in deltas] == [True] + [False] * 3


async def test_cached_tokens_of_a_second_request() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(submit(1))
        await client.finish(1)
        await client.send(submit(2), submit(3, salt="other"))
        await client.finish(2, 3)
        assert client.deltas(1)[0].cached_tokens == 0
        assert client.deltas(2)[0].cached_tokens == 8
        assert client.deltas(3)[0].cached_tokens == 0
        assert client.tokens(1) == client.tokens(2)


async def test_tickets_are_of_their_stream() -> None:
    async with replica() as here:
        one, two = Client(here), Client(here)
        await one.send(submit(5, range(10)))
        await two.send(submit(5, range(20, 30)))
        await asyncio.gather(one.finish(5), two.finish(5))
        assert one.tokens(5) != two.tokens(5)
        await one.send(submit(6, range(20, 30)))
        await one.finish(6)
        assert one.tokens(6) == two.tokens(5)


WRONG: tuple[tuple[Callable[[Submit], object], str], ...] = (
    (lambda s: s.ClearField("token_ids"), "empty"),
    (lambda s: setattr(s, "token_ids", b"12345"), "multiple of 4"),
    (lambda s: setattr(s, "token_ids", struct.pack("<2I", 3, VOCABULARY)), "token id 1000"),
    (lambda s: setattr(s, "token_ids", bytes(4 * 2049)), "KV pool"),
    (lambda s: setattr(s, "token_ids", bytes(4 * 4096)), "context"),
    (lambda s: setattr(s, "model", "other"), "'other' is not served"),
    (lambda s: setattr(s, "adapter", "lora"), "adapter 'lora'"),
    (lambda s: setattr(s, "rank", 1), "no rank 1"),
    (lambda s: setattr(s, "deadline_s", math.nan), "deadline_s"),
    (lambda s: setattr(s.sampling, "max_tokens", 0), "max_tokens"),
    (lambda s: setattr(s.sampling, "temperature", -1), "temperature"),
    (lambda s: setattr(s.sampling, "temperature", math.nan), "temperature"),
    (lambda s: setattr(s.sampling, "top_p", 1.5), "top_p"),
    (lambda s: setattr(s.sampling, "min_p", math.nan), "min_p"),
    (lambda s: setattr(s.sampling, "repetition_penalty", -1), "repetition_penalty"),
    (lambda s: setattr(s.sampling, "logprobs", VOCABULARY + 1), "logprobs"),
    (lambda s: s.sampling.stop.append(""), "stop"),
    (lambda s: setattr(s.sampling, "min_tokens", 1000), "min_tokens"),
    (lambda s: s.sampling.stop_token_ids.append(VOCABULARY), "token id 1000"),
    (lambda s: s.sampling.logit_bias.update({VOCABULARY: 1.0}), "token id 1000"),
)


async def test_what_can_never_run_is_invalid() -> None:
    async with replica() as here:
        client = Client(here)
        for ticket, (change, named) in enumerate(WRONG):
            wrong = submit(ticket)
            change(wrong)
            await client.send(wrong, submit(ticket + 100))
            rejection = await client.refused(ticket)
            assert rejection.reason == Rejection.REASON_INVALID
            assert named in rejection.message
            await client.finish(ticket + 100)
            assert not client.deltas(ticket)


async def test_the_longest_prompt_that_fits_runs() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(submit(1, [7] * 2048))
        await client.finish(1)
        assert len(client.tokens(1)) == 4


async def test_an_open_ticket_cannot_be_taken_twice() -> None:
    async with replica() as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1), submit(1))
        rejection = await client.refused(1)
        assert rejection.reason == Rejection.REASON_INVALID
        assert "already open" in rejection.message
        here.runner.gate.set()
        await client.finish(1)
        await client.send(submit(1))
        await client.read(lambda: len(client.tokens(1)) == 2 * 16)


async def test_a_full_queue_is_overloaded() -> None:
    async with replica(max_waiting=3) as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(*(submit(ticket) for ticket in range(1, 6)))
        assert (await client.refused(4)).reason == Rejection.REASON_OVERLOADED
        assert (await client.refused(5)).reason == Rejection.REASON_OVERLOADED
        here.runner.gate.set()
        await client.finish(1, 2, 3)
        await client.send(submit(6))
        await client.finish(6)


async def test_a_deadline_before_the_first_token() -> None:
    async with replica() as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1, deadline_s=0.02), submit(2, deadline_s=-1), submit(3))
        assert (await client.refused(2)).reason == Rejection.REASON_DEADLINE
        assert (await client.refused(1)).reason == Rejection.REASON_DEADLINE
        here.runner.gate.set()
        await client.finish(3)
        await eventually(lambda: busy(here) == 0)
        assert not client.deltas(1)


async def test_a_deadline_does_not_end_what_has_started() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(endless(1, deadline_s=0.5))
        await client.read(lambda: bool(client.tokens(1)))
        here.runner.gate.clear()
        await asyncio.sleep(0.6)
        await client.send(cancel=[1])
        here.runner.gate.set()
        await client.finish(1)
        assert client.deltas(1)[-1].finish == FINISH_REASON_CANCELLED
        assert not client.rejections(1)


async def test_cancel() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(endless(1), endless(2, token_ids=b""))
        await client.read(lambda: bool(client.deltas(1)))
        await client.send(cancel=[1, 99])
        await client.finish(1)
        assert client.deltas(1)[-1].finish == FINISH_REASON_CANCELLED
        await client.send(cancel=[2])
        await client.finish(2)
        await eventually(lambda: busy(here) == 0)


@pytest.mark.parametrize("how", ["cancelled", "connection lost"])
async def test_the_end_of_a_stream_ends_its_requests(how: str) -> None:
    async with replica() as here:
        channel = connect(here.server)
        leaver = Client(Replica(here.server, here.engine, here.runner, channel))
        stayer = Client(here)
        await leaver.send(*(endless(ticket) for ticket in range(5)))
        await stayer.send(endless(0, salt="other"))
        await leaver.read(lambda: bool(leaver.deltas(4)))
        if how == "cancelled":
            leaver.call.cancel()
        else:
            await channel.close()
        await eventually(lambda: busy(here) == 1)
        await stayer.read(lambda: bool(stayer.deltas(0)))
        await channel.close()


async def test_a_half_closed_stream_is_served_to_its_end() -> None:
    async with replica() as here:
        client = Client(here)
        await client.send(submit(1), submit(2))
        await client.call.done_writing()
        await client.finish(1, 2)
        assert await client.call.read() is grpc.aio.EOF
        assert await client.call.code() == grpc.StatusCode.OK


async def test_a_slow_serve_reader_loses_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DELTAS", 64)
    async with replica(width=1000) as here, connect(here.server) as other:
        here.runner.pace_s = 0.005  # leaves the loop time to write to those who read
        slow = Client(Replica(here.server, here.engine, here.runner, other))
        reader = Client(here)
        await slow.send(endless(1, salt="other"), endless(2, salt="other"))
        await reader.send(endless(1))
        await reader.read(lambda: len(reader.frames) > 10 and busy(here) == 1)
        assert not reader.ended(1)
        await reader.send(cancel=[1])
        await reader.finish(1)
        assert await lost(slow.call) == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_router_that_does_not_read_its_rejections_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "DELTAS", 64)
    async with replica() as here:
        client = Client(here)
        refused = [submit(ticket, model="x" * 1000) for ticket in range(200)]
        for _ in range(20):
            await client.send(*refused)
        assert await lost(client.call) == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_reader_slower_than_the_engine_gets_several_steps_in_one_frame() -> None:
    async with replica(width=1000) as here:
        client = Client(here)
        here.runner.gate.clear()
        await client.send(submit(1, sampling=Sampling(max_tokens=600)))
        await eventually(here.runner.entered.is_set)
        here.runner.gate.set()
        # 600 tokens computed before any is read
        await eventually(lambda: len(here.runner.computed) >= 600 and busy(here) == 0)
        await client.finish(1)
        assert len(client.tokens(1)) == 600 * 4
        assert len(client.frames) < 300


class Answering(RadixEngine):
    """Answers every step for a request that nobody made, and for each it has ended once more."""

    def start(self, emit: Callable[[Step], None]) -> None:
        def emit_more(step: Step) -> None:
            ended = [Output(output.id, [1], "late") for output in step.outputs if output.finish]
            emit(replace(step, outputs=[Output(999, [1], "never"), *step.outputs, *ended]))

        super().start(emit_more)


async def test_an_answer_for_an_unknown_request_is_ignored() -> None:
    async with replica(engine_type=Answering) as here:
        client = Client(here)
        await client.send(submit(1), submit(2, range(50, 60)))
        await client.finish(1, 2)
        await client.send(submit(3))
        await client.finish(3)
        for ticket in (1, 2, 3):
            assert len(client.tokens(ticket)) == 4 * 4
            assert client.deltas(ticket)[-1].finish == FINISH_REASON_LENGTH
        assert await here.server.drain(PATIENCE_S) == 0
