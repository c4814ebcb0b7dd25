"""A replica process whose engine hangs in its first step, for ever."""

import sys

import uvloop
from gated_replica import BLOCK, MODEL, VOCABULARY, GatedRunner, Letters

from hotbranch import log
from hotbranch.settings import ReplicaSettings
from replicas import main, server
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits

if __name__ == "__main__":
    log.setup("info", "json", "replica")
    main.DRAIN_S = 1e5
    server.ENGINE_STOP_S = 0.2
    settings = ReplicaSettings(block_size=BLOCK, kv_tokens=2048)
    runner = GatedRunner(settings.kv_tokens // BLOCK)
    runner.pace_s = 1e6
    limits = Limits.of(settings, max_context=4096)
    engine = RadixEngine(limits, runner, frozenset(), lambda request: Letters(1), VOCABULARY)
    sys.exit(uvloop.run(main.serve(server.ReplicaServer(engine, settings, MODEL, ""), MODEL)))
