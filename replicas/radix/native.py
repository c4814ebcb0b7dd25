"""kernels.c, compiled for this machine: the CPU path of the engine in float32.

It is compiled on first use, in about a second, and kept in the cache directory. Without a compiler,
or where the result does not load, the engine runs on PyTorch's own operators.
"""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_long, c_void_p
from pathlib import Path

import torch  # noqa: F401  # its OpenMP runtime must be loaded before the kernels ask for one
from xxhash import xxh3_64_hexdigest

from hotbranch.log import event

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fopenmp",
    "-fPIC",
    "-shared",
]
COMPILE_S = 120.0
PANEL = 16  # columns of a packed weight panel
SPAN = 64  # the largest block

_P, _L, _F = c_void_p, c_long, c_float
_SIGNATURES = {
    "product_float32": [_P, _L, _L, _P, _P, _L],
    "product_bfloat16": [_P, _L, _L, _P, _P, _L],
    "add_norm": [_P, _P, _P, _F, _P, _L, _L],
    "swiglu": [_P, _P, _L, _L],
    "rotate_and_store": [_P, _P, _P, _F, _P, _P, _P, _P, _P, _L, _L, _L, _L],
    "attend": [_P, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _F],
    "attend_chunk": [_P, _L, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _F],
}

log = logging.getLogger(__name__)


def load(cache_dir: Path) -> ctypes.CDLL | None:
    """The library, or None with a line in the log that says why."""
    try:
        library = ctypes.CDLL(str(_compiled(cache_dir)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        event(log, "no native kernels", logging.WARNING, reason=reason.strip().partition("\n")[0])
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _compiled(cache_dir: Path) -> Path:
    """The path of the compiled library. Raises OSError or SubprocessError."""
    source = SOURCE.read_bytes()
    name = xxh3_64_hexdigest(source + " ".join([*FLAGS, _machine()]).encode())
    target = cache_dir.expanduser() / "kernels" / f"{name}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise OSError("no C compiler (gcc or clang) here")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built), "-lm"]
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
