"""Attention over the paged pool: what one step attends to, planned once and used by every layer.

A step's tokens are concatenated, decode rows first. Rows that compute one token are batched with
rows of similar context, so that padding costs less than the contexts themselves; every longer
chunk attends on its own, over its block table.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.kv import KvPool
from replicas.radix.sequence import Chunk


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [start, stop) of the step, one token each, contexts within a factor of two."""

    start: int
    stop: int
    table: Tensor  # [rows, blocks]
    context: int  # tokens of the longest
    mask: Tensor | None  # [rows, 1, 1, context], additive; None when all are equally long


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows [start, stop) of the step: consecutive tokens of one sequence, the last at `context`."""

    start: int
    stop: int
    table: Tensor  # [1, blocks]
    context: int
    mask: Tensor | None  # [rows, context], additive; None when nothing came before


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step. Planned chunk i is the caller's chunk `order[i]`."""

    order: tuple[int, ...]
    last_rows: tuple[int, ...]  # last row of each planned chunk
    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, where each token's KV goes
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]


def plan(chunks: Seq[Chunk], block_size: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """Lay out the chunks of one step. Masks are in `dtype`, the dtype of queries and keys."""
    order = sorted(range(len(chunks)), key=lambda i: _group(chunks[i]))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows = []
    decodes: list[DecodeGroup] = []
    prefills: list[Prefill] = []
    for group, members in groupby((chunks[i] for i in order), key=_group):
        first, grouped = len(tokens), list(members)
        for chunk in grouped:
            blocks = chunk.sequence.blocks
            row = len(tokens)
            tokens.extend(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.extend(range(chunk.start, chunk.end))
            slots.extend(
                blocks[i // block_size] * block_size + i % block_size
                for i in range(chunk.start, chunk.end)
            )
            last_rows.append(len(tokens) - 1)
            if group == PREFILL:
                prefills.append(_prefill(chunk, row, block_size, device, dtype))
        if group != PREFILL:
            decodes.append(_decode(grouped, first, block_size, device, dtype))
    return Batch(
        tuple(order),
        tuple(last_rows),
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
        tuple(decodes),
        tuple(prefills),
    )


PREFILL = 1 << 30  # sorts after every decode group


def _group(chunk: Chunk) -> int:
    """Single tokens by the power of two of their context, everything longer last."""
    return chunk.end.bit_length() if chunk.end - chunk.start == 1 else PREFILL


def _table(chunk: Chunk, block_size: int) -> list[int]:
    return chunk.sequence.blocks[: -(-chunk.end // block_size)]


def _prefill(
    chunk: Chunk, row: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> Prefill:
    rows = chunk.end - chunk.start
    mask = None
    if chunk.start:
        mask = torch.full((rows, chunk.end), float("-inf"), dtype=dtype, device=device)
        mask.triu_(chunk.start + 1)  # row i sees the first start + i + 1 tokens
    table = torch.tensor([_table(chunk, block_size)], device=device)
    return Prefill(row, row + rows, table, chunk.end, mask)


def _decode(
    chunks: list[Chunk], row: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> DecodeGroup:
    contexts = [chunk.end for chunk in chunks]
    context = max(contexts)
    width = -(-context // block_size)
    # Padded with a block of the row's own: what is masked must still be finite.
    tables = [_table(chunk, block_size) for chunk in chunks]
    padded = [table + table[:1] * (width - len(table)) for table in tables]
    mask = None
    if min(contexts) != context:
        beyond = torch.arange(context) >= torch.tensor(contexts)[:, None]
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None].to(device)
    return DecodeGroup(row, row + len(chunks), torch.tensor(padded, device=device), context, mask)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, layer: int, batch: Batch, pool: KvPool
) -> Tensor:
    """Causal attention of all rows; their keys and values must be in the pool already.

    Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]; the result is
    [rows, heads * head_dim]. Query head h reads KV head h // (heads / kv_heads) (Ainslie et al.,
    GQA).
    """
    out = torch.empty_like(queries)
    for group in batch.decodes:
        out[group.start : group.stop] = _attend_decode(
            queries[group.start : group.stop], layer, group, pool
        )
    for prefill in batch.prefills:
        rows = slice(prefill.start, prefill.stop)
        if prefill.mask is None:
            context = _heads_first(keys[rows]), _heads_first(values[rows])
        else:
            held = pool.read(layer, prefill.table)
            context = held[0][:, :, : prefill.context], held[1][:, :, : prefill.context]
        attended = F.scaled_dot_product_attention(
            _heads_first(queries[rows]),
            *context,
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out.flatten(1)


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, head_dim] to [1, heads, rows, head_dim]."""
    return x.transpose(0, 1)[None]


def _attend_decode(queries: Tensor, layer: int, group: DecodeGroup, pool: KvPool) -> Tensor:
    keys, values = pool.read(layer, group.table)
    # The query heads of one KV head become rows of one product, so KV is never repeated.
    grouped = queries.view(len(queries), keys.shape[1], -1, queries.shape[2])
    attended = F.scaled_dot_product_attention(
        grouped,
        keys[:, :, : group.context],
        values[:, :, : group.context],
        attn_mask=group.mask,
    )
    return attended.flatten(1, 2)
