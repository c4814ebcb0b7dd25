"""Runs the chunks of one engine step through the model, and samples."""

import os
from array import array
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hotbranch.settings import EngineSettings
from replicas.engine import Namespace, Request, Sampling
from replicas.radix import native
from replicas.radix.attention import lay_out
from replicas.radix.config import ModelConfig, UnsupportedModel, read_config
from replicas.radix.kv import KvPool
from replicas.radix.model import Model
from replicas.radix.native_memory import Arena
from replicas.radix.native_ops import NativeOps, PackedLinear, fits
from replicas.radix.ops import TorchOps
from replicas.radix.sampling import Sampler
from replicas.radix.sequence import Chunk, Sampled, Sequence
from replicas.radix.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A loaded model, its KV pool and its sampler. Not thread-safe: one thread runs all steps.

    Sizes are in tokens, `capacity_blocks` in blocks.
    """

    def __init__(self, model: Model) -> None:
        self.vocab_size = model.config.vocab_size
        self.max_context = model.config.context
        self.eos_ids = model.config.eos_ids
        self.block_size = model.pool.block_size
        self.capacity_blocks = model.pool.blocks
        self.device = model.weights.norm.device
        self.dtype = model.pool.dtype
        self._model = model
        self._sampler = Sampler(self.eos_ids)

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> list[Sampled | None]:
        """Compute the chunks in one forward pass; the sampled token of each that samples.

        Every chunk's blocks cover its tokens, the KV of what precedes it is in the pool, and no two
        chunks are of one sequence.
        """
        results: list[Sampled | None] = [None] * len(chunks)
        if not chunks:
            return results
        batch = lay_out(chunks, self.block_size, self.device)
        sampling = [
            (i, row)
            for i, row in zip(batch.order, batch.last_rows, strict=True)
            if chunks[i].samples
        ]
        wanted = torch.tensor([row for _, row in sampling], dtype=torch.int64, device=self.device)
        hidden = self._model.forward(batch, wanted)
        if sampling:
            logits = self._model.logits(hidden)
            sampled = self._sampler.sample(logits, [chunks[i].sequence for i, _ in sampling])
            for (i, _), token in zip(sampling, sampled, strict=True):
                results[i] = token
        return results

    @torch.inference_mode()
    def logits(self, chunks: Seq[Chunk]) -> list[Tensor]:
        """Compute the chunks as `run` does; the logits of all their positions, [tokens, vocab]."""
        batch = lay_out(chunks, self.block_size, self.device)
        everything = torch.arange(len(batch.tokens), device=self.device)
        logits = self._model.logits(self._model.forward(batch, everything))
        results = [logits] * len(chunks)
        for i, last in zip(batch.order, batch.last_rows, strict=True):
            results[i] = logits[last + 1 - (chunks[i].end - chunks[i].start) : last + 1]
        return results

    def forget(self, sequence: Sequence) -> None:
        """Drop the random state and penalty counts of a sequence that has ended."""
        self._sampler.forget(sequence)


def load(model_dir: Path, settings: EngineSettings) -> ModelRunner:
    """Load a model directory and run it once, so that no request pays for lazy initialisation.

    Raises UnsupportedModel, whose message is one line for the user.
    """
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    config = read_config(model_dir, settings.max_context)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config, device)
    blocks = settings.kv_tokens // settings.block_size
    if not blocks:
        raise UnsupportedModel(
            f"kv_tokens {settings.kv_tokens} is less than one block of {settings.block_size}"
        )
    pool = KvPool(config, blocks, settings.block_size, device, dtype)
    kernels = _kernels(config, device, dtype, settings)
    if kernels is None:
        weights = load_weights(model_dir, config, device, dtype)
        model = Model(config, weights, pool, TorchOps(config, weights, pool))
    else:
        # What the kernels sum up, and so what comes between two products, is float32.
        project = partial(PackedLinear.of, kernels, Arena(), dtype)
        weights = load_weights(model_dir, config, device, torch.float32, project)
        model = Model(config, weights, pool, NativeOps(kernels, config, weights, pool))
    runner = ModelRunner(model)
    _warm_up(runner)
    if kernels:
        kernels.release_threads()
    return runner


def _kernels(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, settings: EngineSettings
) -> native.Kernels | None:
    """Those that compute this model in `dtype`, if there are any."""
    if device.type != "cpu" or dtype == torch.float16 or not fits(config, settings.block_size):
        return None
    kernels = native.load(settings.cache_dir)
    return kernels if kernels and dtype in kernels.dtypes else None


def choose_device(name: str) -> torch.device:
    """The device a setting names; `auto` is CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UnsupportedModel(f"device {name}: unknown") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(f"device {name}: no CUDA device here")
    return device


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype a setting names; `auto` is the model's own on CUDA, and on a CPU bfloat16 where
    its instructions multiply bfloat16, else float32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return DTYPES.get(config.dtype, torch.float32)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply it."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _warm_up(runner: ModelRunner) -> None:
    """A prefill, a prefill behind a prefix and a decode, in the first blocks of the empty pool."""
    size = runner.block_size
    length = min(4 * size, runner.capacity_blocks * size, runner.max_context)
    request = Request(0, Namespace(""), b"", Sampling(max_tokens=1, temperature=1.0, top_p=0.9))
    sequence = Sequence(
        request,
        array("I", [0] * length),
        length,
        arrival=0.0,
        blocks=list(range(-(-length // size))),
    )
    for start, end in ((0, length // 2), (length // 2, length), (length - 1, length)):
        if start < end:
            runner.run([Chunk(sequence, start, end)])
    runner.forget(sequence)
