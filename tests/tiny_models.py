"""Tiny models of every supported family, with random weights, in the layout of a real one."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}

# Wavelengths of the 8-wide heads lie on both sides of, and between, the two bounds.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Sizes that the compiled kernels take; those above they do not.
WIDE = {"hidden_size": 96, "intermediate_size": 112, "head_dim": 16}

FAMILIES: dict[str, tuple[Any, type[PreTrainedModel], dict[str, Any]]] = {
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama_tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "tie_word_embeddings": True,
            "eos_token_id": [1, 7],
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 12}),
}


def make(
    family: str, directory: Path, shard_size: str = "5GB", wide: bool = False
) -> PreTrainedModel:
    """Save a model of `family` into `directory` in float32, and return it in eval mode.

    Every parameter is random, norms and biases too: ones and zeros would hide a missing term.
    """
    config_type, model_type, overrides = FAMILIES[family]
    torch.manual_seed(sum(family.encode()))
    model = model_type(config_type(**SHAPE | overrides | (WIDE if wide else {})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.normal_(centre, 0.3)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model.eval()
