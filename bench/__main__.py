"""`python -m bench NAME`."""

import argparse
import importlib
import sys

BENCHMARKS = {
    "index": "a decision of the index, beside NVIDIA Dynamo's",
    "smoke": "a cluster driven by the openai client",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, summary in BENCHMARKS.items():
        commands.add_parser(name, help=summary)
    name = parser.parse_args().name
    module = importlib.import_module(f"bench.{name}")
    status: int = module.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
