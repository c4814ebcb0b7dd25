"""vLLM as the engine."""

import os

# Before vLLM is imported, which reads them once. Its core must not be forked from a process that
# serves gRPC already, nor tell its makers what runs here; what matters we log ourselves.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
