"""Llama-3.1-8B with random weights: the shape, and so the speed, of the real model."""

import torch

from hotbranch.settings import EngineSettings
from replicas.radix.config import ModelConfig, parse_config
from replicas.radix.kv import KvPool
from replicas.radix.model import Model
from replicas.radix.ops import TorchOps
from replicas.radix.runner import DTYPES, ModelRunner, choose_device
from replicas.radix.weights import Layer, Linear, Weights

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}


def random_llama(settings: EngineSettings) -> ModelRunner:
    """A runner on the settings' device, in bfloat16."""
    return random_runner(parse_config(LLAMA_3_1_8B, {}, settings.max_context), settings)


def random_runner(config: ModelConfig, settings: EngineSettings) -> ModelRunner:
    """A model of any shape, its weights small enough that activations stay finite."""
    device, dtype = choose_device(settings.device), DTYPES[config.dtype]

    def matrix(out: int, width: int) -> torch.Tensor:
        return torch.empty(out, width, device=device, dtype=dtype).normal_(std=0.02)

    def layer() -> Layer:
        hidden, attended = config.hidden_size, config.heads * config.head_dim
        ones = torch.ones(hidden, device=device, dtype=dtype)
        return Layer(
            attention_norm=ones,
            qkv=Linear(matrix(attended + 2 * config.kv_heads * config.head_dim, hidden)),
            q_norm=None,
            k_norm=None,
            attention_out=Linear(matrix(hidden, attended)),
            mlp_norm=ones,
            gate_up=Linear(matrix(2 * config.intermediate_size, hidden), gated=True),
            down=Linear(matrix(hidden, config.intermediate_size)),
        )

    weights = Weights(
        embedding=matrix(config.vocab_size, config.hidden_size),
        layers=tuple(layer() for _ in range(config.layers)),
        norm=torch.ones(config.hidden_size, device=device, dtype=dtype),
        head=Linear(matrix(config.vocab_size, config.hidden_size)),
    )
    blocks = settings.kv_tokens // settings.block_size
    pool = KvPool(config, blocks, settings.block_size, device, dtype)
    return ModelRunner(Model(config, weights, pool, TorchOps(config, weights, pool)))
