"""From settings to a loaded engine."""

from functools import partial

from tokenizers import Tokenizer

from hotbranch.embedded import resolve_model
from hotbranch.fingerprint import fingerprint
from hotbranch.settings import EngineSettings
from replicas.engine import Engine
from replicas.radix.detokenize import TextStream
from replicas.radix.engine import RadixEngine
from replicas.radix.runner import load
from replicas.radix.scheduler import Limits


def build_engine(settings: EngineSettings) -> tuple[Engine, str, str]:
    """The engine, not yet started, the name its model is served under, and the fingerprint.

    Raises ModelError, OSError or ValueError, each with one line for the user.
    """
    name, directory = resolve_model(settings.model, settings.cache_dir)
    runner = load(directory, settings)
    engine = RadixEngine(
        Limits.of(settings, runner.max_context),
        runner,
        runner.eos_ids,
        partial(TextStream, Tokenizer.from_file(str(directory / "tokenizer.json"))),
        runner.vocab_size,
    )
    return engine, settings.served_name or name, fingerprint(directory)
