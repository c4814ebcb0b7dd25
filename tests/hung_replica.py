"""A replica process whose engine hangs in its first step, for ever."""

import os
import sys

from gated_replica import BLOCK, MODEL, VOCABULARY, GatedRunner, Letters

from hotbranch import log
from hotbranch.load_settings import load_settings
from hotbranch.settings import ReplicaSettings
from replicas import main, server
from replicas.radix.engine import RadixEngine
from replicas.radix.scheduler import Limits

if __name__ == "__main__":
    log.setup("info", "json", "replica")
    main.DRAIN_S = 1e5
    server.ENGINE_STOP_S = 0.2
    settings = load_settings(ReplicaSettings, {"block_size": BLOCK, "kv_tokens": 2048}, os.environ)
    runner = GatedRunner(settings.kv_tokens // BLOCK)
    runner.pace_s = 1e6
    limits = Limits.of(settings, max_context=4096)
    engine = RadixEngine(limits, runner, frozenset(), lambda request: Letters(1), VOCABULARY)
    main.build = lambda settings: (engine, MODEL, "")
    sys.exit(main.run(settings))
