"""paged_attention on gathered blocks; arguments as in op.py.

T packed tokens, R rows, B decode batch, H heads, KH kv heads, J = H / KH heads on a kv head,
D attention head dim, NB blocks, BS block size in tokens, M blocks of a row in the table,
L query tokens of a tile, K gathered positions.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype

# A tile bounds the mask (J * L, K) and skips the keys that lie ahead of its last token.
_QUERY_TILE: Final = 256
# Elements of keys, and as many of values, that one decode batch may gather.
_MAX_GATHERED: Final = 1 << 24


def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    kv_of_head: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    dtype = accumulate_dtype(q.dtype)
    out = q.new_zeros(q.shape)
    bounds: list[int] = cu_seqlens.tolist()
    contexts: list[int] = context_lens.tolist()
    null: list[bool] = (block_tables[:, 0] == 0).tolist()
    for row, context in enumerate(contexts):
        start, stop = bounds[row], bounds[row + 1]
        if null[row] or start == stop:
            continue
        first = 0 if window is None else max(0, context + 1 - window)
        seq_len = context + stop - start
        k = _gather_row(k_cache, block_tables[row], first, seq_len, dtype)  # (KH, K, D)
        v = _gather_row(v_cache, block_tables[row], first, seq_len, dtype)
        if kv_of_head is not None:
            k, v = k[kv_of_head], v[kv_of_head]
        for tile in range(start, stop, _QUERY_TILE):
            tokens = slice(tile, min(tile + _QUERY_TILE, stop))
            # index in k of the first token of the tile
            position = context - first + tile - start
            out[tokens] = _attend_tile(q[tokens].to(dtype), k, v, position, scale, window)
    return out


def _gather_row(
    cache: Tensor, table: Tensor, first: int, seq_len: int, dtype: torch.dtype
) -> Tensor:
    """(KH, seq_len - first, D): the positions from `first` on; what lies beyond is cut off."""
    block_size = cache.shape[2]
    first_block = first // block_size
    blocks = cache[table[first_block : -(-seq_len // block_size)]]  # (blocks, KH, BS, D)
    run = blocks.transpose(0, 1).flatten(1, 2)
    base = first_block * block_size
    return run[:, first - base : seq_len - base].to(dtype)


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, position: int, scale: float, window: int | None
) -> Tensor:
    """(L, H, D): causal attention of q (L, H, D), whose first token is at `position` of k."""
    length, _, head_dim = q.shape
    first = 0 if window is None else max(0, position + 1 - window)
    stop = position + length
    query_at = torch.arange(position, stop, device=q.device)[:, None]
    key_at = torch.arange(first, stop, device=q.device)
    visible = key_at <= query_at  # (L, K)
    if window is not None:
        visible &= key_at > query_at - window
    heads = q.reshape(length, k.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # (KH, J, L, D)
    y = F.scaled_dot_product_attention(
        heads.flatten(1, 2).unsqueeze(0),
        k[None, :, first:stop],
        v[None, :, first:stop],
        attn_mask=visible.repeat(heads.shape[1], 1),
        scale=scale,
    )  # (1, KH, J * L, D)
    return y.view(heads.shape).permute(2, 0, 1, 3).reshape(length, -1, head_dim)


def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_of_head: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    out = q.new_zeros(q.shape)
    lengths: list[int] = seq_lens.tolist()
    seen = [length if window is None else min(length, window) for length in lengths]
    budget = _MAX_GATHERED // (k_cache.shape[1] * k_cache.shape[3])
    for batch in _batches(seen, budget):
        rows = torch.tensor(batch, device=q.device)
        out[rows] = _attend_batch(
            q[rows],
            k_cache,
            v_cache,
            block_tables[rows],
            seq_lens[rows].long(),
            scale,
            kv_of_head,
            window,
        ).to(q.dtype)
    return out


def _batches(seen: list[int], budget: int) -> Iterator[list[int]]:
    """Split the live rows so that padding to the longest row of a batch costs little.

    A batch gathers at most `budget` positions (or is one row), and at most twice the needed ones.
    """
    longest_first = sorted(
        (row for row in range(len(seen)) if seen[row]), key=lambda row: -seen[row]
    )
    batch: list[int] = []
    for row in longest_first:
        longest = seen[batch[0]] if batch else 0
        if batch and ((len(batch) + 1) * longest > budget or 2 * seen[row] < longest):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _attend_batch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_of_head: Tensor | None,
    window: int | None,
) -> Tensor:
    """(B, H, D) in the accumulate dtype; all rows are live."""
    dtype = accumulate_dtype(q.dtype)
    block_size = k_cache.shape[2]
    first = torch.zeros_like(seq_lens) if window is None else (seq_lens - window).clamp(min=0)
    first_block = first // block_size
    stop_block = (seq_lens + block_size - 1) // block_size
    num_blocks = int((stop_block - first_block).max())

    column = first_block[:, None] + torch.arange(num_blocks, device=q.device)  # (B, blocks)
    in_row = column < stop_block[:, None]
    blocks = block_tables.gather(1, column.where(in_row, 0)).where(in_row, 0)
    position = column[:, :, None] * block_size + torch.arange(block_size, device=q.device)
    position = position.flatten(1)  # (B, K)
    hidden = (position < first[:, None]) | (position >= seq_lens[:, None])

    k = k_cache[blocks].transpose(1, 2).flatten(2, 3).to(dtype)  # (B, KH, K, D)
    v = v_cache[blocks].transpose(1, 2).flatten(2, 3).to(dtype)
    # A weight of 0 does not silence a NaN in memory that no token has written.
    v.masked_fill_(hidden[:, None, :, None], 0)
    if kv_of_head is not None:
        k, v = k[:, kv_of_head], v[:, kv_of_head]
    heads = q.to(dtype).reshape(len(q), k.shape[1], -1, q.shape[2])  # (B, KH, J, D)
    scores = (heads @ k.mT) * scale  # (B, KH, J, K)
    scores.masked_fill_(hidden[:, None, None, :], -math.inf)
    return (scores.softmax(dim=-1) @ v).flatten(1, 2)
