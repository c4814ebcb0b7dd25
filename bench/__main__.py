"""`python -m bench NAME`, and then what that benchmark takes."""

import argparse
import importlib
import sys

BENCHMARKS = {
    "fleet": "every routing policy on a simulated fleet",
    "engine": "the engine, beside vLLM on the same CPU",
    "index": "a decision of the index, beside NVIDIA Dynamo's",
    "vllm": "real vLLM behind our router, round robin, sglang-router and smg",
    "smoke": "a cluster driven by the openai client",
}
MODULES = {"fleet": "bench.fleet.sweep"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="\n".join(f"{name:8} {summary}" for name, summary in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS)
    name = parser.parse_args(sys.argv[1:2]).name
    del sys.argv[1]  # the benchmark reads the rest
    module = MODULES.get(name, f"bench.{name}")
    status: int = importlib.import_module(module).main()
    return status


if __name__ == "__main__":
    sys.exit(main())
