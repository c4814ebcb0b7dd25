"""NVIDIA Dynamo's RadixTree, called from Python, for `bench.index`.

Reads one command a line and answers with one line of JSON: `store` fills a new tree, `decide`
measures token ids to matched blocks for every sequence.
"""

import json
import sys
import time

from dynamo._core import RadixTree, compute_block_hash_for_seq

from bench.index_workload import BLOCK, REPLICAS, percentile, sequences


def main() -> None:
    prompts = [list(tokens) for tokens in sequences()]
    hashes = [compute_block_hash_for_seq(tokens, BLOCK) for tokens in prompts]
    events = [stored(i, chain) for i, chain in enumerate(hashes)]
    tree = RadixTree()
    for command in sys.stdin:
        if command.strip() == "store":
            tree = RadixTree()
            began = time.perf_counter()
            for i, event in enumerate(events):
                tree.apply_event(i % REPLICAS, event)
            tree.find_matches(hashes[0])  # events are applied on a thread: wait for the last
            seconds = time.perf_counter() - began
            answer = {"blocks_per_s": sum(map(len, hashes)) / seconds}
        else:
            times = []
            for i, tokens in enumerate(prompts):
                began = time.perf_counter()
                scores = tree.find_matches(compute_block_hash_for_seq(tokens, BLOCK)).scores
                times.append(time.perf_counter() - began)
                assert scores[(i % REPLICAS, 0)] == len(hashes[i])
            answer = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}
        print(json.dumps(answer), flush=True)


def stored(i: int, chain: list[int]) -> bytes:
    """The engine's event: its own ids for blocks, which are of the path, beside token hashes."""
    ids, parent = [], 0
    for own in chain:
        parent = hash((parent, own)) & (2**64 - 1)
        ids.append(parent)
    blocks = [{"block_hash": id, "tokens_hash": own} for id, own in zip(ids, chain, strict=True)]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": i, "data": data, "dp_rank": 0}).encode()


if __name__ == "__main__":
    main()
