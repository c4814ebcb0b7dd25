"""vLLM, called from Python, for `bench.engine`: arguments MODEL_DIR KV_TOKENS RUNNING DTYPE MODE.

Reads one command a line and answers with one line of JSON, as `bench.engines.radix` does. The
engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that its pool can be made smaller
for a load: what a load shall not use is handed out and kept.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

from bench.engines.closed_loop import Ask, ClosedLoop

BLOCK = 32  # tokens; the smallest for which its CPU attention is fast
CONTEXT = 4096


class VllmSide:
    """The commands."""

    def __init__(self, model: str, kv_tokens: int, running: int, dtype: str, mode: str) -> None:
        from vllm import LLM

        llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=CONTEXT,
            max_num_seqs=running,
            enforce_eager=mode == "eager",
            enable_prefix_caching=True,
            block_size=BLOCK,
            gpu_memory_utilization=0.3,  # of main memory; the pool is sized below
            num_gpu_blocks_override=kv_tokens // BLOCK + 1,  # one is the null block
        )
        self._engine: Any = llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._pool: Any = core.scheduler.kv_cache_manager.block_pool
        self._kept: list[Any] = []
        self._first_id = 0

    def open(self, kv_tokens: int, running: int) -> dict[str, Any]:
        """An empty cache of `kv_tokens`."""
        self._pool.free_blocks(self._kept)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")
        self._kept = self._pool.get_new_blocks(
            self._pool.get_num_free_blocks() - kv_tokens // BLOCK
        )
        return {}

    def run(self, sessions: list[Any], outstanding: int) -> dict[str, Any]:
        loop = ClosedLoop(sessions, outstanding, self._first_id)
        began = time.perf_counter()
        for ask in loop.begin():
            self._submit(ask)
        while not loop.done:
            for output in self._engine.step():
                if output.finished:
                    reply = list(output.outputs[0].token_ids)
                    cached = output.num_cached_tokens or 0
                    following = loop.answered(int(output.request_id), reply, cached)
                    if following is not None:
                        self._submit(following)
        seconds = time.perf_counter() - began
        self._first_id = loop.next_id
        return loop.report(seconds)

    def _submit(self, ask: Ask) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=ask.reply, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(ask.id), {"prompt_token_ids": ask.prompt}, sampling)


def main(answers: TextIO) -> None:
    import vllm

    model, kv_tokens, running, dtype, mode = sys.argv[1:]
    side = VllmSide(model, int(kv_tokens), int(running), dtype, mode)
    facts = {"version": vllm.__version__, "dtype": dtype, "mode": mode}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # vLLM logs to standard output, which is where answers go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(answers)
