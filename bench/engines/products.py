"""The matrix products of a model alone: no prefill can be faster."""

import time
from collections.abc import Sequence

import torch

from replicas.radix.config import ModelConfig
from replicas.radix.runner import ModelRunner
from replicas.radix.weights import Linear, Projection

Layers = Sequence[Sequence[Projection]]


class Products:
    """All projections of all layers but the head.

    By what the engine multiplies with and by PyTorch's `linear`, each with a weight of its own for
    every layer, so that caches help as little as they do in the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        model = runner._model  # what is measured is the model's own weights
        self._runner = runner
        self._shapes = _shapes(model.config)
        layers = model.weights.layers
        self._variants: list[Layers] = [
            [(layer.qkv, layer.attention_out, layer.gate_up, layer.down) for layer in layers]
        ]
        if not isinstance(layers[0].qkv, Linear):
            plain = [[Linear(self._random(*shape)) for shape in self._shapes] for _ in layers]
            self._variants.append(plain)

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Once through the faster variant, for so many rows."""
        inputs = [self._random(rows, width) for _, width in self._shapes]
        return min(self._seconds(layers, inputs) for layers in self._variants)

    def _seconds(self, layers: Layers, inputs: Sequence[torch.Tensor]) -> float:
        self._synchronize()
        began = time.perf_counter()
        for layer in layers:
            for projection, x in zip(layer, inputs, strict=True):
                projection(x)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._runner.dtype, device=self._runner.device)


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of the four projections of a layer."""
    attended = config.heads * config.head_dim
    qkv = attended + 2 * config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)]
