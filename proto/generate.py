"""Stubs from the .proto files: `generate.py` writes them to hotbranch/v1, `--check` compares."""

import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parent
PACKAGE = Path("hotbranch/v1")
SERVICE = SOURCES / PACKAGE / "replica.proto"  # the one file with a service


def generate(root: Path) -> None:
    """Write the stubs, and their types, under `root`."""
    messages = sorted(str(path) for path in (SOURCES / PACKAGE).glob("*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SOURCES}"]
    subprocess.run([*protoc, f"--python_out={root}", f"--pyi_out={root}", *messages], check=True)
    service = [f"--grpc_python_out={root}", f"--mypy_grpc_out=quiet:{root}", str(SERVICE)]
    subprocess.run([*protoc, f"--plugin=protoc-gen-mypy_grpc={plugin}", *service], check=True)


def stale() -> list[str]:
    """Names of stubs that differ from what the .proto files say."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.name: path.read_bytes() for path in (Path(scratch) / PACKAGE).iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    return sorted(name for name in fresh | kept if fresh.get(name) != kept.get(name))


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if names := stale():
            sys.exit(f"stubs differ from proto/: {', '.join(names)}; run `make proto`")
    else:
        generate(ROOT)
