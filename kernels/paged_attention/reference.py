"""paged_attention token by token; arguments as in op.py."""

import torch
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


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
    out = torch.zeros_like(q)
    for row in range(len(context_lens)):
        if block_tables[row, 0] == 0:
            continue
        start, stop = int(cu_seqlens[row]), int(cu_seqlens[row + 1])
        for token in range(start, stop):
            seq_len = int(context_lens[row]) + token - start + 1
            out[token] = _attend(
                q[token], k_cache, v_cache, block_tables[row], seq_len, scale, kv_of_head, window
            )
    return out


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
    out = torch.zeros_like(q)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        out[row] = _attend(
            q[row], k_cache, v_cache, block_tables[row], seq_len, scale, kv_of_head, window
        )
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_len: int,
    scale: float,
    kv_of_head: Tensor | None,
    window: int | None,
) -> Tensor:
    """(H, D): attention of one token (H, D) to the last positions of a sequence of `seq_len`."""
    dtype = accumulate_dtype(q.dtype)
    num_heads, num_kv_heads, block_size = q.shape[0], k_cache.shape[1], k_cache.shape[2]
    first = 0 if window is None else max(0, seq_len - window)
    positions = torch.arange(first, seq_len, device=q.device)
    blocks, offsets = table[positions // block_size], positions % block_size
    k = k_cache[blocks, :, offsets].to(dtype)  # (positions, KH, D)
    v = v_cache[blocks, :, offsets].to(dtype)
    out = torch.zeros_like(q)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads) if kv_of_head is None else kv_of_head[head]
        weights = torch.softmax(k[:, kv_head] @ q[head].to(dtype) * scale, dim=0)
        out[head] = weights @ v[:, kv_head]
    return out
