"""Fixtures that all tests share."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbranch.embedded import ensure
from hotbranch.settings import Common

# Started in the background by a shell, we ignore SIGINT, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before a test module imports torch: one core, no network, no settings from outside.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
for variable in [name for name in os.environ if name.startswith("HOTBRANCH_")]:
    del os.environ[variable]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Take back what a test set up: its stream is closed afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the embedded model, from this machine's cache."""
    return ensure(Common().cache_dir)


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
