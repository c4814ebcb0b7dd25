"""Loading vLLM: from settings to an engine, or one line on why there is none."""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm.config.logging import LoggingConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from hotbranch.settings import EngineSettings
from replicas.engine import Fault, StartError
from replicas.vllm.arguments import Arguments, arguments
from replicas.vllm.engine import Order, VllmEngine
from replicas.vllm.parsing import Parsers
from replicas.vllm.rank import Stepped
from replicas.vllm.stats import Stats

# What vLLM, PyTorch and the drivers say, by what it means.
SIGNS = (
    (
        Fault.OUT_OF_MEMORY,
        r"out of memory|OutOfMemory|MemoryError|No available memory|available KV cache memory"
        r"|[Ff]ree memory on device|Cannot allocate memory|not enough memory",
    ),
    (
        Fault.MODEL_NOT_FOUND,
        r"not a valid model|no file named|not a local folder|Cannot find any model weights"
        r"|Can't load|No such file",
    ),
)
ERRORS = "errors.log"


def load_vllm(settings: EngineSettings, directory: Path, model: str) -> VllmEngine:
    """The engine with its model loaded, which takes from half a minute on. Raises StartError."""
    # Unix sockets, whose paths must be short.
    workspace = tempfile.TemporaryDirectory(prefix="hotbranch-")
    place = Path(workspace.name)
    try:
        given = arguments(settings, directory, f"ipc://{place}/events", f"ipc://{place}/replay")
        if given.engine.logging_config is None:
            given.engine.logging_config = LoggingConfig(
                pylogging_config_file=str(_log_config(place))
            )
        return VllmEngine(
            _opener(given),
            model,
            Order(settings.policy, settings.starvation_s),
            [
                LoRARequest(name, number, path, base_model_name=model)
                for number, (name, path) in enumerate(given.adapters.items(), 1)
            ],
            lambda llm: _parsers(given, llm),
            workspace.cleanup,
        )
    except Exception as error:
        fault, message = _diagnosis(error, place / ERRORS)
        workspace.cleanup()
        raise StartError(fault, message) from error


def _opener(given: Arguments) -> Callable[[Callable[[Stepped], None]], AsyncLLM]:
    def open(stepped: Callable[[Stepped], None]) -> AsyncLLM:
        return AsyncLLM.from_engine_args(given.engine, stat_loggers=[Stats.factory(stepped)])

    return open


def _parsers(given: Arguments, llm: AsyncLLM) -> Parsers | None:
    if not (given.tool_call_parser or given.reasoning_parser):
        return None
    return Parsers(
        given.tool_call_parser, given.reasoning_parser, llm.get_tokenizer(), llm.model_config
    )


def _log_config(place: Path) -> Path:
    """vLLM's log as it is, and its errors in a file: the core is another process, and all that its
    parent hears is that it failed."""
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(levelname)s %(asctime)s [vllm] %(message)s"}},
        "handlers": {
            "stream": {"class": "logging.StreamHandler", "formatter": "plain"},
            "errors": {
                "class": "logging.FileHandler",
                "filename": str(place / ERRORS),
                "level": "ERROR",
                "delay": True,
            },
        },
        "loggers": {
            "vllm": {"handlers": ["stream", "errors"], "level": "WARNING", "propagate": False}
        },
    }
    path = place / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _diagnosis(error: Exception, errors: Path) -> tuple[Fault, str]:
    """What went wrong, of what vLLM raised here and what its core has logged."""
    told = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
    raised = [
        line for line in told.splitlines() if re.match(r"[\w.]+(Error|Exception)\b.*: ", line)
    ]
    first = raised[0] if raised else str(error)
    message = " ".join(first.split())[:300]
    for fault, sign in SIGNS:
        if re.search(sign, told or str(error)):
            return fault, message
    settings = isinstance(error, ValueError) and not raised
    return (Fault.BAD_SETTINGS if settings else Fault.START_FAILED), message
