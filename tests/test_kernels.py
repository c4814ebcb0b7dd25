"""The compiled kernels against PyTorch in float64, and what happens without a compiler."""

import logging
import math
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
from replicas.radix.native import Kernels
from replicas.radix.native_ops import NativeOps, PackedLinear, fits
from replicas.radix.ops import TorchOps
from replicas.radix.sequence import Chunk, Sequence
from replicas.radix.weights import Layer

CACHE = ReplicaSettings().cache_dir
CPU = torch.device("cpu")
HALF_ULP = 2.0**-8  # of bfloat16, relative

BUILDS: dict[str, tuple[str, ...]] = {"whole": ()}
if torch.cpu.get_capabilities().get("avx512_f"):
    BUILDS["avx2"] = ("-mno-avx512f",)


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """As this machine compiles them, and as one with narrower vectors would."""
    found = native.load(CACHE, BUILDS[request.param])
    assert found is not None
    assert found.panel == (16 if request.param == "avx2" else found.panel)
    return found


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, kernels: Kernels) -> torch.dtype:
    if request.param not in kernels.dtypes:
        pytest.skip("this CPU does not multiply bfloat16")
    return request.param  # type: ignore[no-any-return]


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


def close(found: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    """To float32; a result in bfloat16, to so many roundings of numbers of about one."""
    error = 2e-5 + (found.dtype == torch.bfloat16) * roundings * HALF_ULP
    torch.testing.assert_close(found.double(), wanted.double(), rtol=error, atol=error)


# around the edges of a tile of rows, of a band of rows, of a panel, and of a stretch of depth
@pytest.mark.parametrize("rows", [*range(1, 41), 191, 192, 193, 400])
@pytest.mark.parametrize(("width", "out"), [(2, 16), (34, 32), (576, 48), (1200, 80)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_products(
    kernels: Kernels, dtype: torch.dtype, rows: int, width: int, out: int, stored: torch.dtype
) -> None:
    torch.manual_seed(rows * width)
    weight, bias = (torch.randn(out, width) / width**0.5).to(stored), torch.randn(out)
    x = torch.randn(rows, width).to(dtype)
    found = PackedLinear.of(kernels, dtype, weight, bias)(x)
    assert found.dtype == torch.float32
    exact = weight.to(dtype) if dtype == torch.bfloat16 else weight
    close(found, F.linear(x.double(), exact.double(), bias.double()))


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_norm_and_swiglu(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    shape = config()
    ops = NativeOps(kernels, shape, pool(shape, 1, 16, dtype))
    torch.manual_seed(rows)
    x, delta, weight = torch.randn(rows, 64), torch.randn(rows, 64), torch.randn(64)
    total = x.double() + delta.double()
    normed = ops.add_norm(x, delta, weight)
    assert normed.dtype == dtype
    close(x, total)
    close(normed, F.rms_norm(total, (64,), weight.double(), shape.norm_eps))
    torch.testing.assert_close(ops.add_norm(x, None, weight), normed, rtol=0, atol=0)
    close(x, total)
    gate_up = torch.randn(rows, 192) * 30  # exp must neither overflow nor lose what is small
    gate_up[:, 0] = -200.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = ops.swiglu(gate_up)
    assert found.dtype == dtype
    close(found, F.silu(gate) * up)


def pool(shape: ModelConfig, blocks: int, block_size: int, dtype: torch.dtype) -> KvPool:
    made = KvPool(shape, blocks, block_size, CPU, dtype)
    for tensor in (*made.keys, *made.values):
        tensor.normal_()
    return made


def layer(normed: bool, head_dim: int) -> Layer:
    norm = torch.randn(head_dim) if normed else None
    unused = torch.empty(0)
    return Layer(unused, F.silu, norm, norm, F.silu, unused, F.silu, F.silu)


def exact_pool(shape: ModelConfig, held: KvPool) -> KvPool:
    """A pool in float64 that holds the same."""
    made = KvPool(shape, held.blocks, held.block_size, CPU, torch.float64)
    for mine, other in zip((*held.keys, *held.values), (*made.keys, *made.values), strict=True):
        other.copy_(mine)
    return made


def as_multiplied(qkv: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Rotated qkv as the products meet it: queries scaled for a softmax of base 2, and rounded."""
    scale = torch.tensor(qkv.shape[-1] ** -0.5) * math.log2(math.e)
    queries = (qkv[:, :heads] * scale).to(dtype).double() / scale.double()
    return torch.cat((queries, qkv[:, heads:].to(dtype).double()), dim=1)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=6),
    singles=st.lists(st.integers(0, 400), max_size=6),
    block_size=st.sampled_from([1, 4, 5, 16, 24, 32, 64]),
    shape=st.sampled_from(
        [(1, 1, 16), (6, 2, 32), (4, 2, 48), (9, 3, 64), (8, 1, 16), (16, 2, 80), (4, 4, 128)]
    ),
    normed=st.booleans(),
)
def test_rotation_and_attention(
    kernels: Kernels,
    dtype: torch.dtype,
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
    ours = pool(model, taken, block_size, dtype)
    before = exact_pool(model, ours)
    batch = lay_out(chunks, block_size, CPU)
    qkv = torch.randn(len(batch.tokens), model.heads + 2 * model.kv_heads, model.head_dim)
    angles = torch.randn(len(qkv), model.head_dim // 2)
    turns = angles.cos(), angles.sin()
    weights = layer(normed, model.head_dim)

    reference = TorchOps(model, before)
    rotated = reference.rotate_and_store(qkv.double(), 0, weights, batch, *turns)
    ops = NativeOps(kernels, model, ours)
    found = ops.rotate_and_store(qkv, 0, weights, batch, *turns)
    close(found, rotated)
    # a rounding more: what is near the middle between two numbers may go either way
    close(ours.keys[0], before.keys[0], 2 if normed else 1)
    close(ours.values[0], before.values[0])

    # Compared over the same KV. Each weight is rounded, and the result.
    reference = TorchOps(model, exact_pool(model, ours))
    attended = ops.attend(found, 0, ops.prepare(batch))
    assert attended.dtype == dtype
    exact = as_multiplied(found, model.heads, dtype)
    close(attended, reference.attend(exact, 0, reference.prepare(batch)), 4)


def test_one_long_context_is_shared_by_the_threads(kernels: Kernels, dtype: torch.dtype) -> None:
    """However many pieces contexts are cut into; what is short beside it stays whole."""
    model = config()
    for tokens in (3, 16, 17, 2000):
        made = [sequence([7] * n, list(range(-(-n // 16)))) for n in (30, tokens)]
        ends = [Chunk(one, len(one.tokens) - 1, len(one.tokens)) for one in made]
        batch = lay_out(ends, 16, CPU)
        memory = pool(model, 125, 16, dtype)
        qkv = torch.randn(2, 10, 32)
        counts = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            ops = NativeOps(kernels, model, memory)
            plan = ops.prepare(batch)
            wanted = TorchOps(model, exact_pool(model, memory))
            exact = as_multiplied(qkv, model.heads, dtype)
            close(ops.attend(qkv, 0, plan), wanted.attend(exact, 0, wanted.prepare(batch)), 4)
            counts.append(plan.pieces[:, 0].bincount().tolist())
        torch.set_num_threads(1)
        assert counts == ([[1, 4], [1, 8], [1, 25]] if tokens == 2000 else [[1, 1]] * 3)


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
