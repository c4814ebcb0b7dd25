"""The shape of a Llama-family model, read from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


class UnsupportedModel(ValueError):
    """The model directory holds something this engine does not run; one line says what."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al., RoFormer, section 3.2.2) and its frequency scaling.

    `kind` is default, linear (Chen et al., Position Interpolation) or llama3 (the Llama 3.1 model
    card); the last three fields belong to llama3.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know. `context` is the longest sequence, in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context: int
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str
    eos_ids: frozenset[int]


def read_config(model_dir: Path, max_context: int = 0) -> ModelConfig:
    """Read `config.json` and `generation_config.json`; `max_context` 0 keeps the model's limit.

    Raises UnsupportedModel, also for a missing or malformed file.
    """
    raw = _read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_config(raw, generation, max_context)


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], max_context: int = 0
) -> ModelConfig:
    """The configuration in the two parsed files. Raises UnsupportedModel."""
    architecture = _architecture(raw)
    context = _context(raw, max_context)
    _refuse_unsupported(raw, architecture, context)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", 8 if architecture.startswith("Mistral") else heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
    hidden_size = _size(raw, "hidden_size")
    eos = generation.get("eos_token_id")
    return ModelConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(
            raw, "head_dim", 128 if architecture.startswith("Qwen3") else hidden_size // heads
        ),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        context=context,
        qkv_bias=architecture.startswith("Qwen2"),
        qk_norm=architecture.startswith("Qwen3"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=_ids(raw.get("eos_token_id") if eos is None else eos),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path}: no such file") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    supported = [name for name in names if name in ARCHITECTURES]
    if not supported:
        named = ", ".join(names) or "none"
        raise UnsupportedModel(
            f"unsupported architecture: {named} (supported: {', '.join(sorted(ARCHITECTURES))})"
        )
    return str(supported[0])


def _context(raw: Mapping[str, Any], max_context: int) -> int:
    limit = _size(raw, "max_position_embeddings")
    return min(limit, max_context) if max_context else limit


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str, context: int) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"unsupported: quantised weights ({method})")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"unsupported hidden_act: {raw['hidden_act']}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModel(f"unsupported: {key}")
    slides = raw.get("use_sliding_window", architecture.startswith("Mistral"))
    window = raw.get("sliding_window") if slides else None
    if window is not None and window < context:
        raise UnsupportedModel(
            f"unsupported: sliding window of {window} tokens, smaller than the context of {context}"
            f" (max_context {window} or less works)"
        )


def _rope(raw: Mapping[str, Any]) -> Rope:
    """Both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(found.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = found.get("rope_type", found.get("type", "default"))
    if found.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("unsupported: partial_rotary_factor")
    try:
        match kind:
            case "default":
                return Rope(theta)
            case "linear":
                return Rope(theta, kind, factor=float(found["factor"]))
            case "llama3":
                return Rope(
                    theta,
                    kind,
                    factor=float(found["factor"]),
                    low_freq_factor=float(found["low_freq_factor"]),
                    high_freq_factor=float(found["high_freq_factor"]),
                    original_context=int(found["original_max_position_embeddings"]),
                )
    except KeyError as missing:
        raise UnsupportedModel(f"config.json: rope scaling {kind} lacks {missing}") from None
    raise UnsupportedModel(f"unsupported rope scaling: {kind} (supported: linear, llama3)")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset([int(value)])
