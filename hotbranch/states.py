"""The states that a replica tells of itself, and how metrics and listings name them."""

from collections.abc import Mapping

from hotbranch.v1.replica_pb2 import STATE_LOADING, State

NAMES: Mapping[int, str] = {
    number: name.removeprefix("STATE_").lower() for name, number in State.items()
}


def in_words(name: str) -> str:
    """A state as people are told of it."""
    return "loading weights" if name == NAMES[STATE_LOADING] else name.replace("_", " ")
