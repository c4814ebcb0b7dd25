"""From settings to vLLM's engine arguments, and which of those the contract leaves no choice."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from hotbranch.settings import EngineSettings

# What a replica would not be itself without, and why.
FIXED: Mapping[str, str] = {
    "model": "--model names it",
    "tokenizer": "the model's own is used, which the router has, too",
    "served_model_name": "--served-name gives it",
    "max_model_len": "--max-context gives it",
    "dtype": "--dtype gives it",
    "enable_prefix_caching": "what is cached is what the router routes by",
    "kv_events_config": "the replica reports what is cached, and listens itself",
    "scheduling_policy": "the replica hands over requests by priority",
    "enable_log_requests": "prompts are never logged",
    "disable_log_stats": "load reports are made of them",
    "enable_logging_iteration_details": "load reports are made of them",
    "skip_tokenizer_init": "stop strings need text",
    "runner": "a replica generates",
    "convert": "a replica generates",
    "enable_prompt_embeds": "prompts are token ids",
    "stream_interval": "every step is reported",
    "data_parallel_rank": "all ranks belong to one replica",
    "data_parallel_external_lb": "the router balances, and the ranks belong to one replica",
    "data_parallel_hybrid_lb": "the router balances, and the ranks belong to one replica",
    "max_num_queued_reqs": "requests wait in the replica: --max-waiting",
    "max_num_queued_tokens": "requests wait in the replica: --max-waiting",
}
# Settings of the radix engine that vLLM has under names of its own.
OTHERS: Mapping[str, str] = {
    "block_size": "block_size",
    "kv_tokens": "num_gpu_blocks_override",
    "chunk_tokens": "max_num_batched_tokens",
    "max_running": "max_num_seqs",
    "threads": "",
    "device": "",
}
KNOWN = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """What is not vLLM's engine's: `adapters` are LoRA directories by name."""

    engine: AsyncEngineArgs
    adapters: Mapping[str, str]
    tool_call_parser: str
    reasoning_parser: str


def arguments(settings: EngineSettings, directory: Path, events: str, replay: str) -> Arguments:
    """`events` and `replay` are ZMQ endpoints. Raises ValueError with one line for the user."""
    given = {name: _value(value) for name, value in settings.engine_args.items()}
    for name, own in OTHERS.items():
        if getattr(settings, name) != EngineSettings.model_fields[name].default:
            flag = "--" + name.replace("_", "-")
            hint = f": --engine-args {own}=..." if own else ""
            raise ValueError(f"{flag} is not for the vllm engine{hint}")
    for name in given:
        if name in FIXED:
            raise ValueError(f"--engine-args {name}: it cannot be chosen; {FIXED[name]}")
        if name not in KNOWN and name not in ("tool_call_parser", "adapters"):
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--engine-args {name}: vLLM has no such argument{hint}")
    tools = str(given.pop("tool_call_parser", ""))
    adapters = _adapters(given.pop("adapters", {}))
    ranks = int(given.get("data_parallel_size", 1))
    engine = _checked(
        {
            **given,
            "model": str(directory),
            "dtype": settings.dtype,
            "max_model_len": settings.max_context or None,
            "enable_lora": bool(adapters) or bool(given.get("enable_lora")),
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "disable_log_stats": False,
            "enable_logging_iteration_details": True,
            "kv_events_config": KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=events if ranks == 1 else "tcp://*:0",
                replay_endpoint=replay if ranks == 1 else "tcp://*:0",
            ),
        }
    )
    return Arguments(engine, adapters, tools, str(given.get("reasoning_parser", "")))


def _checked(values: dict[str, Any]) -> AsyncEngineArgs:
    try:
        return AsyncEngineArgs(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--engine-args: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _value(value: Any) -> Any:
    """A flag's or a variable's text as YAML has it: 0.9 is a number, true a truth, {a: 1} a map."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _adapters(value: Any) -> Mapping[str, str]:
    """{name: directory}."""
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
        raise ValueError("--engine-args adapters: should be a map of names to directories")
    for name, path in value.items():
        if not (Path(path) / "adapter_config.json").is_file():
            raise ValueError(f"--engine-args adapters: {name}: {path} holds no adapter_config.json")
    return value
