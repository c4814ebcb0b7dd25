"""From settings to a loaded engine."""

from functools import partial

from tokenizers import Tokenizer

from hotbranch.embedded import resolve_model
from hotbranch.fingerprint import fingerprint
from hotbranch.settings import EngineSettings
from replicas.engine import Engine, Request
from replicas.radix.detokenize import CONTEXT, TextStream
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
        partial(open_text, Tokenizer.from_file(str(directory / "tokenizer.json"))),
        runner.vocab_size,
    )
    return engine, settings.served_name or name, fingerprint(directory)


def open_text(tokenizer: Tokenizer, request: Request) -> TextStream:
    """The text of a request: behind its prompt, up to its stop strings."""
    prompt = memoryview(request.prompt).cast("I")
    return TextStream(tokenizer, request.sampling.stop, prompt[-CONTEXT:].tolist())
