"""Weights from safetensors files into the fused layout of the forward pass.

Fusing q, k, v and gate, up turns five matrix products a layer into two wider ones.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replicas.radix.config import ModelConfig, UnsupportedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


Projection = Callable[[Tensor], Tensor]
"""[tokens, in] to [tokens, out]. Every matrix product of the model is one."""


class Project(Protocol):
    """Makes a projection of a weight [out, in] and a bias [out], in the dtype they are stored in.

    Of a gated weight, the first half of the outputs are gates: it gives silu(gates) * others.
    """

    def __call__(
        self, weight: Tensor, bias: Tensor | None = None, gated: bool = False
    ) -> Projection: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """The projection of PyTorch."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None
    gated: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if not self.gated:
            return out
        gate, up = out.chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms are [hidden], or [head_dim] for `q_norm` and `k_norm`."""

    attention_norm: Tensor
    qkv: Projection  # out: heads, then KV heads of keys, then of values, times head_dim
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Projection
    mlp_norm: Tensor
    gate_up: Projection  # gated: SwiGLU (Shazeer, 2020)
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `embedding` may be narrower than the norms, whose dtype is the model's."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Projection


Fetch = Callable[[str, tuple[int, ...]], Tensor]


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    project: Project | None = None,
) -> Weights:
    """Read one `model.safetensors`, or the shards its index names, one tensor at a time.

    `project` makes the projections, by default those of PyTorch on `device` in `dtype`. Raises
    UnsupportedModel when a file or tensor is missing, unreadable or of another shape.
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
            return tensor

        def linear(weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Projection:
            moved = None if bias is None else bias.to(device, dtype)
            return Linear(weight.to(device, dtype), moved, gated)

        return _assemble(config, fetch, project or linear, device, dtype)


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


def _assemble(
    config: ModelConfig, fetch: Fetch, project: Project, device: torch.device, dtype: torch.dtype
) -> Weights:
    def norm(name: str, size: int) -> Tensor:
        return fetch(f"{name}.weight", (size,)).to(device, dtype)

    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = fetch("model.embed_tokens.weight", vocab_shape)
    head = embedding if config.tied_embeddings else fetch("lm_head.weight", vocab_shape)
    return Weights(
        embedding=embedding.to(device, min(embedding.dtype, dtype, key=lambda d: d.itemsize)),
        layers=tuple(
            _layer(config, fetch, norm, project, f"model.layers.{i}.") for i in range(config.layers)
        ),
        norm=norm("model.norm", config.hidden_size),
        head=project(head),
    )


def _layer(
    config: ModelConfig,
    fetch: Fetch,
    norm: Callable[[str, int], Tensor],
    project: Project,
    prefix: str,
) -> Layer:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * head_dim, config.kv_heads * head_dim
    qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    bias = None
    if config.qkv_bias:
        bias = torch.cat([fetch(f"{attention}{name}.bias", (n,)) for name, n in qkv.items()])

    def weights(where: str, names: Mapping[str, int], width: int) -> Tensor:
        """Matrices of one input, side by side."""
        return torch.cat([fetch(f"{where}{name}.weight", (n, width)) for name, n in names.items()])

    return Layer(
        attention_norm=norm(prefix + "input_layernorm", hidden),
        qkv=project(weights(attention, qkv, hidden), bias),
        q_norm=norm(attention + "q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm(attention + "k_norm", head_dim) if config.qk_norm else None,
        attention_out=project(weights(attention, {"o_proj": hidden}, queries)),
        mlp_norm=norm(prefix + "post_attention_layernorm", hidden),
        gate_up=project(weights(mlp, {"gate_proj": inner, "up_proj": inner}, hidden), gated=True),
        down=project(weights(mlp, {"down_proj": hidden}, inner)),
    )
