"""The tokens of one step, and PyTorch's way to attend over the paged pool.

A step's tokens are concatenated, single tokens first. In PyTorch, single tokens are batched with
those of similar context, so that padding costs less than the contexts themselves; every longer
chunk attends on its own, over its block table.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.radix.kv import KvPool
from replicas.radix.sequence import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [row, row + rows): consecutive tokens of one sequence, the first at `position`.

    Its block table, which covers the last of them, is tables[table : table + blocks].
    """

    row: int
    rows: int
    position: int
    table: int
    blocks: int

    @property
    def context(self) -> int:
        """Tokens that the last row attends to."""
        return self.position + self.rows


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step. Span i is the caller's chunk `order[i]`; singles come first."""

    order: tuple[int, ...]
    spans: tuple[Span, ...]
    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, where each token's KV goes
    tables: Tensor  # int64

    @property
    def last_rows(self) -> list[int]:
        return [span.row + span.rows - 1 for span in self.spans]


def lay_out(chunks: Seq[Chunk], block_size: int, device: torch.device) -> Batch:
    """Concatenate the chunks of one step, single tokens by context, everything longer last."""

    def length_then_context(i: int) -> tuple[bool, int]:
        chunk = chunks[i]
        return chunk.end - chunk.start > 1, chunk.end

    order = sorted(range(len(chunks)), key=length_then_context)
    spans, tokens, positions, slots, tables = [], [], [], [], []
    row = table = 0
    for chunk in (chunks[i] for i in order):
        blocks = np.array(chunk.sequence.blocks[: -(-chunk.end // block_size)], dtype=np.int64)
        position = np.arange(chunk.start, chunk.end, dtype=np.int64)
        spans.append(Span(row, len(position), chunk.start, table, len(blocks)))
        tokens.append(np.array(chunk.sequence.tokens[chunk.start : chunk.end], dtype=np.int64))
        positions.append(position)
        slots.append(blocks[position // block_size] * block_size + position % block_size)
        tables.append(blocks)
        row, table = row + len(position), table + len(blocks)

    def joined(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Batch(
        tuple(order), tuple(spans), *(joined(p) for p in (tokens, positions, slots, tables))
    )


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
class Plan:
    """How a step attends, the same in every layer."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]


def plan_attention(batch: Batch, pool: KvPool) -> Plan:
    """Masks are in the pool's dtype, which is that of queries and keys."""
    singles = [span for span in batch.spans if span.rows == 1]
    groups = groupby(singles, key=lambda span: span.context.bit_length())
    return Plan(
        tuple(_decode(list(members), batch.tables, pool) for _, members in groups),
        tuple(_prefill(span, batch.tables, pool) for span in batch.spans[len(singles) :]),
    )


def _prefill(span: Span, tables: Tensor, pool: KvPool) -> Prefill:
    mask = None
    if span.position:
        mask = torch.full((span.rows, span.context), float("-inf"), dtype=pool.dtype)
        # row i sees the first position + i + 1 tokens
        mask = mask.triu_(span.position + 1).to(tables.device)
    table = tables[None, span.table : span.table + span.blocks]
    return Prefill(span.row, span.row + span.rows, table, span.context, mask)


def _decode(spans: list[Span], tables: Tensor, pool: KvPool) -> DecodeGroup:
    contexts = torch.tensor([span.context for span in spans])
    context = spans[-1].context  # spans come by context
    width = spans[-1].blocks
    # Padded with a block of the row's own: what is masked must still be finite.
    columns = torch.arange(width)
    places = torch.stack([span.table + columns * (columns < span.blocks) for span in spans])
    mask = None
    if spans[0].context != context:
        beyond = torch.arange(context) >= contexts[:, None]
        mask = torch.zeros(beyond.shape, dtype=pool.dtype).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None].to(tables.device)
    table = tables[places.to(tables.device)]
    return DecodeGroup(spans[0].row, spans[-1].row + 1, table, context, mask)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, layer: int, plan: Plan, pool: KvPool
) -> Tensor:
    """Causal attention of all rows; their keys and values must be in the pool already.

    Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]; the result is
    [rows, heads * head_dim]. Query head h reads KV head h // (heads / kv_heads) (Ainslie et al.,
    GQA).
    """
    out = torch.empty_like(queries)
    for group in plan.decodes:
        out[group.start : group.stop] = _attend_decode(
            queries[group.start : group.stop], layer, group, pool
        )
    for prefill in plan.prefills:
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
    grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[2])
    attended = F.scaled_dot_product_attention(
        grouped,
        keys[:, :, : group.context],
        values[:, :, : group.context],
        attn_mask=group.mask,
    )
    return attended.flatten(1, 2)
