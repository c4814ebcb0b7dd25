"""From settings to a loaded engine."""

import errno
import sys
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from hotbranch import progress
from hotbranch.embedded import ModelError, resolve_model
from hotbranch.fingerprint import fingerprint
from hotbranch.settings import EngineSettings
from replicas.engine import Engine, Fault, Request, StartError
from replicas.radix.config import read_config
from replicas.radix.detokenize import CONTEXT, TextStream
from replicas.radix.engine import RadixEngine
from replicas.radix.runner import load
from replicas.radix.scheduler import Limits
from replicas.simulated.profile import Profile
from replicas.simulated.runner import TEXT, SimulatedRunner


def build_engine(settings: EngineSettings) -> tuple[Engine, str, str]:
    """The engine, not yet started, the name its model is served under, and the fingerprint.

    Raises StartError for what can be foreseen.
    """
    if settings.engine_args and settings.engine != "vllm":
        message = f"--engine-args are for the vllm engine, not for {settings.engine}"
        raise StartError(Fault.BAD_SETTINGS, message)
    try:
        return _build(settings)
    except StartError:
        raise
    except Exception as error:
        fault = _fault(error)
        if fault is None:
            raise
        said = str(error).partition("\n")[0]
        message = f"out of memory: {said}" if fault is Fault.OUT_OF_MEMORY else said
        raise StartError(fault, message) from error


def _build(settings: EngineSettings) -> tuple[Engine, str, str]:
    with progress.shown(sys.stderr) as report:
        name, directory = resolve_model(settings.model, settings.cache_dir, report)
    if settings.engine == "vllm":
        try:
            from replicas.vllm.start import load_vllm  # only now, and only where it is installed
        except ModuleNotFoundError as error:
            message = f"the vllm engine needs {error.name}, which is not installed"
            raise ValueError(message) from None
        served = settings.served_name or name
        return load_vllm(settings, directory, served), served, fingerprint(directory)
    build = simulated if settings.engine == "simulated" else radix
    engine = build(settings, directory, Tokenizer.from_file(str(directory / "tokenizer.json")))
    return engine, settings.served_name or name, fingerprint(directory)


def _fault(error: Exception) -> Fault | None:
    """What an error means that was foreseen."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Fault.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Fault.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        return Fault.OUT_OF_MEMORY  # on a CPU, torch has no type for it
    if isinstance(error, ModelError | FileNotFoundError):
        return Fault.MODEL_NOT_FOUND
    if isinstance(error, OSError | ValueError):
        return Fault.BAD_SETTINGS
    return None


def radix(settings: EngineSettings, directory: Path, tokenizer: Tokenizer) -> RadixEngine:
    """The engine that runs the model."""
    runner = load(directory, settings)
    limits = Limits.of(settings, runner.max_context)
    return RadixEngine(
        limits, runner, runner.eos_ids, partial(open_text, tokenizer), runner.vocab_size
    )


def simulated(settings: EngineSettings, directory: Path, tokenizer: Tokenizer) -> RadixEngine:
    """The same engine with a GPU of the profile's instead of a model. Of the model it has the
    tokenizer; the sizes of the pool, of a chunk and of the context are the profile's."""
    profile = Profile.load(settings.profile)
    config = read_config(directory, 0)
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    runner = SimulatedRunner(profile, text, min(config.eos_ids))
    sizes = {"kv_tokens": profile.kv_tokens, "chunk_tokens": profile.chunk_tokens}
    limits = Limits.of(settings.model_copy(update=sizes), profile.max_context)
    return RadixEngine(
        limits, runner, config.eos_ids, partial(open_text, tokenizer), config.vocab_size
    )


def open_text(tokenizer: Tokenizer, request: Request) -> TextStream:
    """The text of a request: behind its prompt, up to its stop strings."""
    prompt = memoryview(request.prompt).cast("I")
    sampling = request.sampling
    return TextStream(
        tokenizer,
        sampling.stop,
        prompt[-CONTEXT:].tolist(),
        sampling.include_stop,
        sampling.min_tokens,
        sampling.special_tokens,
    )
