"""The states that a replica tells of itself, and how metrics and listings name them."""

from collections.abc import Mapping

from hotbranch.v1.replica_pb2 import (
    STATE_LOADING,
    STATE_MODEL_NOT_FOUND,
    STATE_OUT_OF_MEMORY,
    STATE_START_FAILED,
    State,
)

NAMES: Mapping[int, str] = {
    number: name.removeprefix("STATE_").lower() for name, number in State.items()
}
# Without an engine: such a replica answers only what it is.
UNLOADED = frozenset(
    {STATE_LOADING, STATE_MODEL_NOT_FOUND, STATE_OUT_OF_MEMORY, STATE_START_FAILED}
)


def in_words(name: str) -> str:
    """A state as people are told of it."""
    return "loading weights" if name == NAMES[STATE_LOADING] else name.replace("_", " ")
