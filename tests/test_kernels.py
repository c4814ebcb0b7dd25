"""The compiled kernels against PyTorch in float64, and what happens without a compiler."""

import ctypes
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import sequence
from torch import Tensor

from hotbranch.settings import ReplicaSettings
from replicas.radix import native
from replicas.radix.attention import lay_out
from replicas.radix.config import ModelConfig, Rope
from replicas.radix.kv import KvPool
from replicas.radix.native_ops import NativeOps, PackedLinear, fits
from replicas.radix.ops import Ops, TorchOps
from replicas.radix.sequence import Chunk, Sequence
from replicas.radix.weights import Layer

CACHE = ReplicaSettings().cache_dir


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = native.load(CACHE)
    assert found is not None
    return found


def config(heads: int = 6, kv_heads: int = 2, head_dim: int = 32) -> ModelConfig:
    return ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=Rope(10000.0),
        context=4096,
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        dtype="float32",
        eos_ids=frozenset(),
    )


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-5, atol=2e-5)


# around the edges of a tile of rows, of a block of rows, and of a stretch of depth
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 95, 96, 97, 200])
@pytest.mark.parametrize(("width", "out"), [(1, 16), (33, 32), (576, 48), (577, 16), (1200, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(
    library: ctypes.CDLL, rows: int, width: int, out: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows * width)
    weight, bias = (torch.randn(out, width) / width**0.5).to(dtype), torch.randn(out)
    x = torch.randn(rows, width)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    close(PackedLinear.of(library, weight, bias)(x), wanted)


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_norm_and_swiglu(library: ctypes.CDLL, rows: int) -> None:
    shape = config()
    ops = NativeOps(library, shape, pool(shape, 1, 16))
    torch.manual_seed(rows)
    x, delta, weight = torch.randn(rows, 64), torch.randn(rows, 64), torch.randn(64)
    total = x.double() + delta.double()
    normed = ops.add_norm(x, delta, weight)
    close(x, total)
    close(normed, F.rms_norm(total, (64,), weight.double(), shape.norm_eps))
    close(ops.add_norm(x, None, weight), normed)
    close(x, total)
    gate_up = torch.randn(rows, 192) * 30  # exp must neither overflow nor lose what is small
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(ops.swiglu(gate_up), F.silu(gate) * up)


def pool(shape: ModelConfig, blocks: int, block_size: int) -> KvPool:
    made = KvPool(shape, blocks, block_size, torch.device("cpu"), torch.float32)
    for tensor in (*made.keys, *made.values):
        tensor.normal_()
    return made


def layer(normed: bool, head_dim: int) -> Layer:
    norm = torch.randn(head_dim) if normed else None
    unused = torch.empty(0)
    return Layer(unused, F.silu, norm, norm, F.silu, unused, F.silu, F.silu)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), min_size=1, max_size=6),
    singles=st.lists(st.integers(0, 300), max_size=6),
    block_size=st.sampled_from([1, 4, 16, 24, 64]),
    shape=st.sampled_from([(1, 1, 16), (6, 2, 32), (9, 3, 64), (8, 1, 16), (4, 4, 128)]),
    normed=st.booleans(),
)
def test_rotation_and_attention(
    library: ctypes.CDLL,
    spans: list[tuple[int, int]],
    singles: list[int],
    block_size: int,
    shape: tuple[int, int, int],
    normed: bool,
) -> None:
    """Chunks behind contexts and decodes, in one step, over scattered blocks."""
    model = config(*shape)
    chunks, taken = [], 0
    for start, rows in [*spans, *((start, 1) for start in singles)]:
        blocks = -(-(start + rows) // block_size)
        made: Sequence = sequence([7] * (start + rows), list(range(taken, taken + blocks))[::-1])
        chunks.append(Chunk(made, start, start + rows))
        taken += blocks
    torch.manual_seed(taken)
    ours, theirs = pool(model, taken, block_size), pool(model, taken, block_size)
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        other.copy_(mine)
    batch = lay_out(chunks, block_size, torch.device("cpu"))
    qkv = torch.randn(len(batch.tokens), model.heads + 2 * model.kv_heads, model.head_dim)
    angles = torch.randn(len(qkv), model.head_dim // 2)
    weights = layer(normed, model.head_dim)
    results = []
    both: list[Ops] = [NativeOps(library, model, ours), TorchOps(model, theirs)]
    for ops in both:
        rotated = ops.rotate_and_store(qkv.clone(), 0, weights, batch, angles.cos(), angles.sin())
        results.append((rotated, ops.attend(rotated, 0, ops.prepare(batch))))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted)
    close(ours.keys[0], theirs.keys[0])
    close(ours.values[0], theirs.values[0])


def test_one_long_context_is_shared_by_the_threads(library: ctypes.CDLL) -> None:
    """However many pieces a context is cut into, and where there are more pieces than blocks."""
    model = config()
    for tokens in (3, 16, 17, 2000):
        made = sequence([7] * tokens, list(range(-(-tokens // 16))))
        batch = lay_out([Chunk(made, tokens - 1, tokens)], 16, torch.device("cpu"))
        memory = pool(model, len(batch.tables), 16)
        qkv = torch.randn(1, 10, 32)
        plans = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            ops = NativeOps(library, model, memory)
            plans.append(ops.prepare(batch))
            wanted = TorchOps(model, memory)
            close(ops.attend(qkv, 0, plans[-1]), wanted.attend(qkv, 0, wanted.prepare(batch)))
        torch.set_num_threads(1)
        assert len({plan.pieces for plan in plans}) == 3


def test_what_the_kernels_do_not_fit_runs_on_pytorch() -> None:
    assert fits(config(), 16)
    assert not fits(config(head_dim=24), 16)
    assert not fits(config(), 128)


def test_without_a_compiler_there_are_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert native.load(tmp_path) is None
    assert "no native kernels" in caplog.text
    (tmp_path / "cc").write_text("#!/bin/sh\necho cannot compile >&2; exit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert native.load(tmp_path) is None
    assert not list(tmp_path.glob("kernels/*.so"))
