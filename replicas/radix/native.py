"""The folder kernels/, compiled for this machine: the CPU path of the engine.

It is compiled on first use, in some seconds, and kept in the cache directory. Without a compiler,
or where the result does not load, the engine runs on PyTorch's own operators.
"""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence as Seq
from ctypes import Structure, c_float, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch  # its OpenMP runtime must be loaded before the kernels ask for one
from xxhash import xxh3_64_hexdigest

from hotbranch.log import event

SOURCES = Path(__file__).with_name("kernels")
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
COMPILE_S = 120.0
LARGEST_BLOCK = 64
MULTIPLE = 16  # of which every size of a model is one

_P, _L, _F = c_void_p, c_long, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "layers": [_P, _P],
    "product": [_P, _L, _L, _P, _P, _L, _L],
    "norm": [_P, _P, _F, _P, _L, _L],
    "rotate_and_store": [_P, _P, _P, _P, _F, _P, _P, _P, _P, _P, _L, _L, _L, _L],
    "attend": [_P, _L, _P, _P, _P, _P, _P, _P, _L, _P, _P, _L, _L, _L, _L, _F],
    "attend_chunk": [_P, _L, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _F],
}
SET, GATED = 0, 2  # modes of a product


class Projection(Structure):
    """struct projection of step.h."""

    _fields_ = (("panels", _P), ("widened", _L))


class Layer(Structure):
    """struct layer of step.h."""

    _fields_ = (
        *((name, _P) for name in ("attention_norm", "qkv_bias", "q_norm", "k_norm", "mlp_norm")),
        *((name, Projection) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, _P) for name in ("keys", "values")),
    )


class Model(Structure):
    """struct model of step.h."""

    _fields_ = (
        ("layers", _P),
        ("norm", _P),
        *((n, _L) for n in ("depth", "hidden", "inner", "heads", "kv_heads", "dim", "block")),
        ("eps", _F),
    )


class Step(Structure):
    """struct step of step.h."""

    _fields_ = (
        ("rows", _L),
        *((n, _P) for n in ("x", "cos", "sin", "slots", "tables", "starts", "contexts", "pieces")),
        ("count", _L),
        ("chunks", _P),
        ("chunk_count", _L),
        ("wanted", _P),
        ("wanted_count", _L),
        *((n, _P) for n in ("qkv", "partial", "attended", "inner", "packed", "normed")),
    )


log = logging.getLogger(__name__)


class Kernels:
    """The functions of the library, by their names in C."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.panel: int = 2 * self._library.lanes()
        self.dtypes = {torch.float32}
        if self._library.has_bfloat16():
            self.dtypes.add(torch.bfloat16)

    def release_threads(self) -> None:
        """Give up the OpenMP threads that wait for the calling one.

        Another thread gets its own. When all together are more than the CPUs, none spins any more
        at the end of a loop but sleeps at once, and decoding takes twice as long.
        """
        self._library.release_threads()

    def function(self, name: str, kind: str) -> "ctypes._NamedFuncPointer":
        found = self._library[f"{name}_{kind}"]
        found.argtypes = _SIGNATURES[name]
        found.restype = None
        return found


def load(cache_dir: Path, flags: Seq[str] = ()) -> Kernels | None:
    """The kernels, or None with a line in the log that says why. `flags` are the compiler's."""
    try:
        return Kernels(_compiled(cache_dir, [*FLAGS, *flags]))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        event(log, "no native kernels", logging.WARNING, reason=reason.strip().partition("\n")[0])
        return None


def _compiled(cache_dir: Path, flags: list[str]) -> Path:
    """The path of the compiled library. Raises OSError or SubprocessError."""
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.is_file())
    name = xxh3_64_hexdigest(sources + " ".join([*flags, _machine()]).encode())
    target = cache_dir.expanduser() / "kernels" / f"{name}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise OSError("no C compiler (gcc or clang) here")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        command = [compiler, *flags, str(SOURCES / "kernels.c"), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
        built.rename(target)  # at once, whoever else compiles
    return target


def _machine() -> str:
    """What -march=native depends on: a cache directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
