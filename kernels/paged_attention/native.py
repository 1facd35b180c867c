"""paged_attention in C; arguments as in op.py.

T packed tokens, R rows, B decode batch, H heads, KH kv heads, D attention head dim, NB blocks,
BS block size in tokens, M blocks of a row in the table.
"""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code, pointer
from plait.kernels.paged_attention import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    paged_attention_prefill="piiipiipiipipiiiiifpppii",
    paged_attention_decode="piiipiipiipipiiiiifppi",
)

# More positions than a sequence has; differences of two fit 32 bits.
_ALL: Final = 1 << 30


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
    if torch.float64 in (q.dtype, k_cache.dtype, v_cache.dtype):
        return torch_impl.paged_attention_prefill(
            q,
            k_cache,
            v_cache,
            block_tables=block_tables,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            scale=scale,
            kv_of_head=kv_of_head,
            window=window,
        )
    q, block_tables, kv_of_head = _operands(q, block_tables, kv_of_head)
    cu_seqlens, context_lens = cu_seqlens.contiguous(), context_lens.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    library.load().paged_attention_prefill(
        q.data_ptr(),
        dtype_code(q.dtype),
        q.stride(0),
        q.stride(1),
        k_cache.data_ptr(),
        dtype_code(k_cache.dtype),
        k_cache.stride(0),
        v_cache.data_ptr(),
        dtype_code(v_cache.dtype),
        v_cache.stride(0),
        block_tables.data_ptr(),
        block_tables.stride(0),
        pointer(kv_of_head),
        num_heads,
        k_cache.shape[1],
        k_cache.shape[2],
        head_dim,
        _ALL if window is None else min(window, _ALL),
        scale,
        out.data_ptr(),
        cu_seqlens.data_ptr(),
        context_lens.data_ptr(),
        len(context_lens),
        num_tokens,
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
    if torch.float64 in (q.dtype, k_cache.dtype, v_cache.dtype):
        return torch_impl.paged_attention_decode(
            q,
            k_cache,
            v_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            scale=scale,
            kv_of_head=kv_of_head,
            window=window,
        )
    q, block_tables, kv_of_head = _operands(q, block_tables, kv_of_head)
    seq_lens = seq_lens.contiguous()
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype)
    library.load().paged_attention_decode(
        q.data_ptr(),
        dtype_code(q.dtype),
        q.stride(0),
        q.stride(1),
        k_cache.data_ptr(),
        dtype_code(k_cache.dtype),
        k_cache.stride(0),
        v_cache.data_ptr(),
        dtype_code(v_cache.dtype),
        v_cache.stride(0),
        block_tables.data_ptr(),
        block_tables.stride(0),
        pointer(kv_of_head),
        num_heads,
        k_cache.shape[1],
        k_cache.shape[2],
        head_dim,
        _ALL if window is None else min(window, _ALL),
        scale,
        out.data_ptr(),
        seq_lens.data_ptr(),
        num_rows,
    )
    return out


def _operands(
    q: Tensor, block_tables: Tensor, kv_of_head: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same with adjacent elements of a head, of a row of the table and of the map."""
    if q.stride(2) != 1:
        q = q.contiguous()
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    return q, block_tables, None if kv_of_head is None else kv_of_head.contiguous()
