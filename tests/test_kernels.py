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
from replicas.radix.attention import Batch, attend, lay_out, plan_attention
from replicas.radix.config import ModelConfig, Rope
from replicas.radix.kv import KvPool
from replicas.radix.native import Kernels
from replicas.radix.native_memory import Arena
from replicas.radix.native_ops import PackedLinear, cut, fits, kind
from replicas.radix.sequence import Chunk, Sequence

CACHE = ReplicaSettings().cache_dir
CPU = torch.device("cpu")
HALF_ULP = 2.0**-8  # of bfloat16, relative

CAN = torch.cpu.get_capabilities()
WHOLE: tuple[str, ...] = ()  # as this machine compiles them
AVX2 = ("-mno-avx512f",)  # as one with narrower vectors does
BUILDS = {"whole-float32": (WHOLE, torch.float32)}
if CAN.get("avx512_bf16"):
    BUILDS["whole-bfloat16"] = (WHOLE, torch.bfloat16)
if CAN.get("avx512_f"):
    BUILDS["avx2-float32"] = (AVX2, torch.float32)


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    flags, dtype = BUILDS[request.param]
    found = native.load(CACHE, flags)
    assert found is not None
    assert dtype in found.dtypes
    assert found.panel == (16 if flags else found.panel)
    return found, dtype


@pytest.fixture(scope="module")
def kernels(build: tuple[Kernels, torch.dtype]) -> Kernels:
    return build[0]


@pytest.fixture(scope="module")
def dtype(build: tuple[Kernels, torch.dtype]) -> torch.dtype:
    return build[1]


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
    found = PackedLinear.of(kernels, Arena(), dtype, weight, bias)(x)
    assert found.dtype == torch.float32
    exact = weight.to(dtype) if dtype == torch.bfloat16 else weight
    close(found, F.linear(x.double(), exact.double(), bias.double()))


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 200])
@pytest.mark.parametrize("inner", [16, 48])
@pytest.mark.parametrize("width", [64, 1200, 4112])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_gated_products(
    kernels: Kernels, dtype: torch.dtype, rows: int, inner: int, width: int, stored: torch.dtype
) -> None:
    """exp must neither overflow nor lose what is small."""
    torch.manual_seed(rows)
    weight = torch.randn(2 * inner, width) / width**0.5
    weight[:inner] *= 5
    weight = weight.to(dtype).to(stored)
    x = torch.randn(rows, width).to(dtype)
    x[0] = -200 * weight[0] / weight[0].float().square().sum()
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    found = PackedLinear.of(kernels, Arena(), dtype, weight, gated=True)(x)
    assert found.dtype == dtype
    assert gate.min() < -190
    close(found, F.silu(gate) * up)


def call(
    kernels: Kernels, name: str, dtype: torch.dtype, *arguments: Tensor | float | None
) -> None:
    """Call a kernel, of a tensor by its address."""
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    kernels.function(name, kind(dtype))(*plain)


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_norm(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, out = torch.randn(rows, 80), torch.randn(80), torch.empty(rows, 80, dtype=dtype)
    call(kernels, "norm", dtype, x, weight, 1e-5, out, rows, 80)
    close(out, F.rms_norm(x.double(), (80,), weight.double(), 1e-5))


def pool(shape: ModelConfig, blocks: int, block_size: int, dtype: torch.dtype) -> KvPool:
    made = KvPool(shape, blocks, block_size, CPU, dtype)
    for tensor in (*made.keys, *made.values):
        tensor.normal_()
    return made


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=6),
    singles=st.lists(st.integers(0, 400), max_size=6),
    block_size=st.sampled_from([1, 4, 5, 16, 24, 32, 64]),
    shape=st.sampled_from(
        [(1, 1, 16), (6, 2, 32), (4, 2, 48), (9, 3, 64), (8, 1, 16), (16, 2, 80), (4, 4, 128)]
    ),
    normed=st.booleans(),
    biased=st.booleans(),
)
def test_rotation_and_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    spans: list[tuple[int, int]],
    singles: list[int],
    block_size: int,
    shape: tuple[int, int, int],
    normed: bool,
    biased: bool,
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
    memory = pool(model, taken, block_size, dtype)
    batch = lay_out(chunks, block_size, CPU)
    rows, heads, kv_heads, dim = len(batch.tokens), *shape
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
    angles = torch.randn(rows, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    norms = [torch.randn(dim) if normed else None for _ in range(2)]
    bias = torch.randn(heads + 2 * kv_heads, dim) if biased else None
    wanted = rotated(qkv.double(), bias, norms, cos, sin, heads, kv_heads)
    places = batch.slots, memory.keys[0], memory.values[0], rows, heads, kv_heads, dim
    call(kernels, "rotate_and_store", dtype, qkv, bias, *norms, 1e-5, cos, sin, *places)
    close(qkv, wanted)
    keys, values = (held[0].flatten(0, 1)[batch.slots] for held in (memory.keys, memory.values))
    assert torch.equal(keys, qkv[:, heads:-kv_heads].to(dtype))
    assert torch.equal(values, qkv[:, -kv_heads:].to(dtype))

    out = attended(kernels, model, memory, qkv, batch)
    close(out, exactly_attended(memory, qkv, heads, batch), 4)  # each weight is rounded, too


def rotated(
    qkv: Tensor,
    bias: Tensor | None,
    norms: list[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """Biased, normed, and the pairs of queries and keys turned as complex numbers."""
    parts = list((qkv if bias is None else qkv + bias).split([heads, kv_heads, kv_heads], dim=1))
    for i, weight in enumerate(norms):
        if weight is not None:
            parts[i] = F.rms_norm(parts[i], weight.shape, weight.double(), 1e-5)
        pairs = torch.complex(*parts[i].chunk(2, dim=-1))
        pairs = pairs * torch.complex(cos.double(), sin.double())[:, None]
        parts[i] = torch.cat((pairs.real, pairs.imag), dim=-1)
    return torch.cat(parts, dim=1)


def attended(
    kernels: Kernels,
    shape: ModelConfig,
    memory: KvPool,
    qkv: Tensor,
    batch: Batch,
    threads: int = 2,
) -> Tensor:
    """Single tokens cut into pieces for so many threads, chunks one by one."""
    singles = [span for span in batch.spans if span.rows == 1]
    pieces = cut(singles, memory.block_size, threads)
    starts = torch.tensor([span.table for span in singles], dtype=torch.int64)
    contexts = torch.tensor([span.context for span in singles], dtype=torch.int64)
    rows, width, dim = qkv.shape
    out = torch.full((rows, shape.heads, dim), torch.nan, dtype=memory.dtype)
    partial = torch.full((len(pieces), shape.heads, dim + 2), torch.nan)
    held = memory.keys[0], memory.values[0]
    sizes = shape.heads, shape.kv_heads, dim, memory.block_size, dim**-0.5
    where = batch.tables, starts, contexts, pieces, len(pieces)
    call(kernels, "attend", memory.dtype, qkv, width, *held, *where, out, partial, *sizes)
    for span in batch.spans[len(singles) :]:
        tokens = span.context + -span.context % kernels.panel
        packed = torch.full((2, tokens, shape.kv_heads, dim), torch.nan, dtype=memory.dtype)
        table = batch.tables[span.table :]
        rows_of = (
            qkv[span.row],
            width,
            *held,
            table,
            packed,
            out[span.row],
            span.rows,
            span.position,
        )
        call(kernels, "attend_chunk", memory.dtype, *rows_of, *sizes)
    return out.flatten(1)


def exactly_attended(memory: KvPool, qkv: Tensor, heads: int, batch: Batch) -> Tensor:
    """In float64, of what the products meet: KV as it is in the pool, and queries that were scaled
    for a softmax of base 2 and then rounded."""
    exact = KvPool(
        config(1, *memory.keys[0].shape[2:]), memory.blocks, memory.block_size, CPU, torch.float64
    )
    exact.keys, exact.values = ([held[0].double()] for held in (memory.keys, memory.values))
    scale = torch.tensor(qkv.shape[-1] ** -0.5) * math.log2(math.e)
    queries = (qkv[:, :heads] * scale).to(memory.dtype).double() / scale.double()
    keys, values = (held[0].flatten(0, 1)[batch.slots] for held in (exact.keys, exact.values))
    return attend(queries, keys, values, 0, plan_attention(batch, exact), exact)


def test_contexts_are_cut_into_pieces_of_one_size(kernels: Kernels, dtype: torch.dtype) -> None:
    """However many those are; what is short beside a long one stays whole."""
    shape = config()
    for tokens in (3, 16, 17, 2000):
        made = [sequence([7] * n, list(range(-(-n // 16)))) for n in (30, tokens)]
        ends = [Chunk(one, len(one.tokens) - 1, len(one.tokens)) for one in made]
        batch = lay_out(ends, 16, CPU)
        memory = pool(shape, 125, 16, dtype)
        qkv = torch.randn(2, 10, 32)
        counts = []
        for threads in (1, 2, 7):
            out = attended(kernels, shape, memory, qkv, batch, threads)
            close(out, exactly_attended(memory, qkv, shape.heads, batch), 4)
            counts.append(cut(batch.spans, 16, threads)[:, 0].bincount().tolist())
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
