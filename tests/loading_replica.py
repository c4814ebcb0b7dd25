"""A replica process that loads for ever, in native code."""

import sys
from typing import NoReturn

import torch

from hotbranch import log
from hotbranch.settings import ReplicaSettings
from replicas import main


def forever(settings: ReplicaSettings) -> NoReturn:
    numbers = torch.ones(1 << 16)
    while True:
        numbers.sum()


if __name__ == "__main__":
    log.setup("info", "json", "replica")
    main.build = forever
    sys.exit(main.run(ReplicaSettings()))
