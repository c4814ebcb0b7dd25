"""Which of vLLM's engine arguments a replica takes, and how it says no."""

from pathlib import Path
from typing import Any

import pytest

from hotbranch.settings import EngineSettings
from replicas.vllm.arguments import FIXED, KNOWN, Arguments, arguments


def given(tmp_path: Path, **engine_args: Any) -> Arguments:
    settings = EngineSettings(engine="vllm", engine_args=engine_args)
    return arguments(settings, tmp_path, "ipc:///a", "ipc:///b")


def test_values_are_what_their_text_says(tmp_path: Path) -> None:
    engine = given(
        tmp_path,
        gpu_memory_utilization="0.5",
        enforce_eager="true",
        max_num_seqs="7",
        hf_overrides='{"a": 1}',
        quantization="fp8",
    ).engine
    assert engine.gpu_memory_utilization == 0.5
    assert engine.enforce_eager is True
    assert engine.max_num_seqs == 7
    assert engine.hf_overrides == {"a": 1}
    assert engine.quantization == "fp8"
    assert engine.enable_prefix_caching is True
    assert engine.scheduling_policy == "priority"
    assert engine.kv_events_config is not None
    assert engine.kv_events_config.endpoint == "ipc:///a"


def test_ranks_publish_on_ports(tmp_path: Path) -> None:
    engine = given(tmp_path, data_parallel_size=2).engine
    assert engine.kv_events_config is not None
    assert engine.kv_events_config.endpoint == "tcp://*:0", "ipc is refused for a second rank"


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_the_contract_needs_cannot_be_chosen(tmp_path: Path, name: str) -> None:
    assert name in KNOWN, "vLLM has it"
    with pytest.raises(ValueError, match=f"^--engine-args {name}: it cannot be chosen; .+") as info:
        given(tmp_path, **{name: "x"})
    assert "\n" not in str(info.value)


def test_slips_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such argument; did you mean enforce_eager"):
        given(tmp_path, enforce_eagr=True)
    settings = EngineSettings(engine="vllm", block_size=64)
    with pytest.raises(ValueError, match="--block-size is not for the vllm engine: --engine-args"):
        arguments(settings, tmp_path, "ipc:///a", "ipc:///b")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json"):
        given(tmp_path, adapters={"a": str(tmp_path)})
    with pytest.raises(ValueError, match="should be a map of names to directories"):
        given(tmp_path, adapters="a")


def test_settings_of_ours_reach_vllm(tmp_path: Path) -> None:
    settings = EngineSettings(engine="vllm", dtype="float16", max_context=512)
    engine = arguments(settings, tmp_path, "ipc:///a", "ipc:///b").engine
    assert (engine.dtype, engine.max_model_len, engine.model) == ("float16", 512, str(tmp_path))
