"""A process of its own that churns an index at full speed, and prints its resident memory.

Ten minutes of eight replicas that store and evict 1,000 blocks a second each, or less if asked.
"""

import json
import os
import random
import sys
from collections import deque
from pathlib import Path

from router.fleet.holder import Holder
from router.index.index import Index

REPLICAS = 8
BLOCKS_PER_S = 1000
HELD = 50_000  # blocks that a replica has room for
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def soak(seconds: int) -> dict[str, int]:
    """Resident bytes after the warm-up, their largest and last value since, and blocks stored."""
    rng = random.Random(0)
    index = Index()
    holders = [Holder(f"r{number}") for number in range(REPLICAS)]
    runs: dict[Holder, deque[list[int]]] = {holder: deque() for holder in holders}
    held = dict.fromkeys(holders, 0)
    for holder in holders:
        index.add(holder)
        index.replace(holder, [], 0.0)
    wanted = REPLICAS * (HELD + seconds * BLOCKS_PER_S)
    stored = warm = largest = 0
    while stored < wanted:
        holder = rng.choice(holders)
        first = rng.getrandbits(62)
        run = list(range(first, first + rng.choice((1, 4, 16, 64, 256))))
        now = stored / (REPLICAS * BLOCKS_PER_S)
        index.expire(now)
        index.predict(holder, run, now)
        index.store(holder, None, run, now)
        index.computed(holder, run, 0, now)
        runs[holder].append(run)
        held[holder] += len(run)
        stored += len(run)
        while held[holder] > HELD:
            gone = runs[holder].popleft()
            index.evict(holder, gone[::-1])
            held[holder] -= len(gone)
        if stored > REPLICAS * HELD * 2 and rng.random() < 0.002:
            warm = warm or resident()
            largest = max(largest, resident())
    return {"warm": warm, "largest": largest, "last": resident(), "stored": stored}


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]))))
