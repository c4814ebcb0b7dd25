"""What placing and queueing one request takes among many that wait: real time, one core."""

import random
import time
from statistics import median
from typing import NamedTuple

from router.fleet.holder import Holder
from router.index.index import Index
from router.schedule.job import Job
from router.schedule.policies.hotbranch import Hotbranch
from router.schedule.scheduler import FleetScheduler, Rules

REPLICAS, WAITING, MEASURED = 64, 10_000, 2_000
SIZE, CHUNK = 16, 8192
FAMILIES, TENANTS = 200, 20
SHARED, OWN = 128, (64, 512)  # blocks


class _Load(NamedTuple):
    outstanding_tokens: int = 0
    running: int = 4
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    step_s: float = 0.01
    prefill_s_per_token: float = 2e-5


def scheduling_us() -> float:
    """The median, in microseconds; one job leaves for each that comes."""
    index = Index()
    scheduler = FleetScheduler(index, Hotbranch(), Rules(), {})
    for number in range(REPLICAS):
        holder = Holder(str(number))
        index.add(holder, SIZE, 1 << 20)
        index.replace(holder, [], 0.0)
        scheduler.reported(scheduler.add(holder, SIZE, CHUNK), _Load(), 0.0)
    rng = random.Random(0)
    took: list[float] = []
    id = 0
    while len(took) < MEASURED:
        id += 1
        job = _job(id, rng)
        began = time.perf_counter()
        scheduler.arrive(job, id * 1e-3)
        if len(scheduler.waiting) <= WAITING:
            continue
        took.append(time.perf_counter() - began)
        longest = max(scheduler.servers.values(), key=lambda server: len(server.queue))
        scheduler.cancel(longest.queue.some(1)[0][0])
    return median(took) * 1e6


def _job(id: int, rng: random.Random) -> Job:
    family, own = rng.randrange(FAMILIES), rng.randint(*OWN)
    keys = [hash((family, i)) for i in range(SHARED)] + [hash((family, id, i)) for i in range(own)]
    tenant = f"tenant {rng.randrange(TENANTS)}"
    return Job(id, len(keys) * SIZE + 1, {SIZE: keys}, id * 1e-3, tenant)
