"""Weights from safetensors files into the fused layout of the forward pass.

Fusing q, k, v and gate, up turns five matrix products a layer into two wider ones.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replicas.radix.config import ModelConfig, UnsupportedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: [tokens, in] to [tokens, out]. Every matrix product of the model is one."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms are [hidden], or [head_dim] for `q_norm` and `k_norm`."""

    attention_norm: Tensor
    qkv: Linear  # out: heads, then KV heads of keys, then of values, times head_dim
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear  # out: gate, then up
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model; `head` shares the embedding's memory where they are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear


Fetch = Callable[[str, tuple[int, ...]], Tensor]


def load_weights(
    model_dir: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Read one `model.safetensors`, or the shards its index names, one tensor at a time.

    Raises UnsupportedModel when a file or tensor is missing, unreadable or of another shape.
    """
    with ExitStack() as stack:
        where = _open_shards(model_dir, stack)

        def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
            if name not in where:
                raise UnsupportedModel(f"{model_dir}: no tensor {name}")
            tensor: Tensor = where[name].get_tensor(name)  # type: ignore[no-untyped-call]
            if tuple(tensor.shape) != shape:
                raise UnsupportedModel(
                    f"{model_dir}: {name} has shape {tuple(tensor.shape)}, expected {shape}"
                )
            return tensor.to(device=device, dtype=dtype)

        return _assemble(config, fetch)


def _open_shards(model_dir: Path, stack: ExitStack) -> dict[str, safe_open]:
    """Tensor name to the open file that holds it."""
    index = model_dir / INDEX
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = [SINGLE]
    where = {}
    for file in files:
        try:
            shard = stack.enter_context(safe_open(model_dir / file, framework="pt"))
        except FileNotFoundError:
            raise UnsupportedModel(f"{model_dir / file}: no such file") from None
        except SafetensorError as error:
            raise UnsupportedModel(f"{model_dir / file}: {error}") from None
        where.update(dict.fromkeys(shard.keys(), shard))
    return where


def _assemble(config: ModelConfig, fetch: Fetch) -> Weights:
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = fetch("model.embed_tokens.weight", vocab_shape)
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(config, fetch, f"model.layers.{i}.") for i in range(config.layers)),
        norm=fetch("model.norm.weight", (config.hidden_size,)),
        head=Linear(embedding if config.tied_embeddings else fetch("lm_head.weight", vocab_shape)),
    )


def _layer(config: ModelConfig, fetch: Fetch, prefix: str) -> Layer:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def norm(name: str, size: int) -> Tensor:
        return fetch(f"{prefix}{name}.weight", (size,))

    return Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=Linear(
            torch.cat([fetch(f"{attention}{name}.weight", (n, hidden)) for name, n in qkv.items()]),
            torch.cat([fetch(f"{attention}{name}.bias", (n,)) for name, n in qkv.items()])
            if config.qkv_bias
            else None,
        ),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        attention_out=Linear(fetch(attention + "o_proj.weight", (hidden, queries))),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=Linear(
            torch.cat(
                [fetch(f"{mlp}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
            )
        ),
        down=Linear(fetch(mlp + "down_proj.weight", (hidden, inner))),
    )
