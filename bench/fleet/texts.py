"""Recorded agents as load: trajectories of tau-bench, and prompts of the Berkeley Function Calling
Leaderboard. They are public data that whoever wants them brings.

No tokenizer: four bytes of text stand for a token, which is near what tokenizers make of English.
Nothing says when a request came; it comes once its turn does, one after the other.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from bench.fleet.traces import Arrival, TraceError, records

TAU = "gpt-4o-airline.json"
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
MULTI_TURN = ("base", "long_context", "miss_func", "miss_param")
INTERVAL_S = 0.1
DOCS = {  # class -> file of its functions, where that is not the class in snake case
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


def tau_bench(path: Path) -> Iterator[Arrival]:
    """Every message of the assistant is a request: what stands before it is the prompt. `path` is
    a file of trajectories. Raises TraceError.
    """
    try:
        trajectories = json.loads(path.read_text(encoding="utf-8"))
        turns = [
            (messages[:i], message)
            for messages in (trajectory["traj"] for trajectory in trajectories)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: no trajectories: {error!r}") from None
    return _timed((_spoken(before), _spoken([message])) for before, message in turns)


def bfcl_live(folder: Path) -> Iterator[Arrival]:
    """Single questions about functions that users brought: their schemas, then the question."""
    prompts = (
        json.dumps(record["function"]) + _spoken(record["question"][0])
        for name in LIVE
        for _, record in records(folder / f"BFCL_v4_{name}.json")
    )
    return _timed((prompt, "x" * 200) for prompt in prompts)


def bfcl_multi_turn(folder: Path) -> Iterator[Arrival]:
    """Every turn of a user is a request: the schemas of the APIs, and the conversation so far, in
    which the calls of the reference answer stand for what the assistant said.
    """
    docs = {
        name: "".join(map(json.dumps, functions))
        for name, stem in DOCS.items()
        for functions in [[f for _, f in records(folder / f"multi_turn_func_doc/{stem}.json")]]
    }
    return _timed(
        turn
        for name in MULTI_TURN
        for (_, record), (_, answer) in zip(
            records(folder / f"BFCL_v4_multi_turn_{name}.json"),
            records(folder / f"possible_answer/BFCL_v4_multi_turn_{name}.json"),
            strict=True,
        )
        for turn in _turns(record, answer, docs)
    )


def _turns(
    record: Mapping[str, Any], answer: Mapping[str, Any], docs: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    text = "".join(docs[name] for name in record["involved_classes"])
    for question, calls in zip(record["question"], answer["ground_truth"], strict=True):
        text += _spoken(question)
        reply = json.dumps(calls)
        yield text, reply
        text += reply


def _spoken(messages: list[dict[str, Any]]) -> str:
    return "".join(
        f"{message['role']}: {message.get('content') or ''}{_calls(message)}\n"
        for message in messages
    )


def _calls(message: Mapping[str, Any]) -> str:
    return json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""


def _timed(turns: Iterator[tuple[str, str]]) -> Iterator[Arrival]:
    for number, (text, reply) in zip(count(), turns):
        data = text.encode()
        yield Arrival(number * INTERVAL_S, data[: len(data) // 4 * 4], max(1, len(reply) // 4))
