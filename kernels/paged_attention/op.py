"""Checks and dispatch of paged_attention.

T packed tokens, R rows, B decode batch, H heads, KH kv heads, D attention head dim, NB blocks,
BS block size in tokens, M blocks of a row in the table.
"""

from torch import Tensor

from plait.kernels.arguments import INT32, INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import KernelError


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
    """Attend from every token of every row to the tokens of its row up to itself.

    The keys and values of the tokens themselves are already in the cache.

    Args:
        q: (T, H, D), any float dtype; tokens past the last row are ignored.
        k_cache, v_cache: (NB, KH, BS, D), any float dtype.
        block_tables: (R, M) int64, the blocks of a row in order; a row whose first block is 0 is
            null: nothing is loaded for it.
        cu_seqlens: (R+1,) int32, row r is tokens cu_seqlens[r] to cu_seqlens[r+1].
        context_lens: (R,) int32, tokens of the row that came before this call.
        scale: multiplies the scores.
        kv_of_head: (H,) int64; None: head h uses kv head h // (H // KH), the fast case.
        window: positions that a token sees, itself included; None: all.
    Returns:
        (T, H, D) in the dtype of `q`, 0 in null rows; computed in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(q.device)
    args.check("q", q, "T H D", FLOATS)
    _check_cache(args, k_cache, v_cache, kv_of_head, window)
    args.check("block_tables", block_tables, "R M", INT64)
    args.check_rows(cu_seqlens)
    args.check("context_lens", context_lens, "R", INT32)
    out: Tensor = implementation("paged_attention", q.device).paged_attention_prefill(
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
    """Attend from the last token of every row to all tokens of its row.

    Args:
        q: (B, H, D), any float dtype.
        k_cache, v_cache, scale, kv_of_head, window: as in `paged_attention_prefill`.
        block_tables: (B, M) int64, the blocks of a row in order.
        seq_lens: (B,) int32, tokens of the row with the current one; 0 marks a null row: nothing
            is loaded for it.
    Returns:
        (B, H, D) in the dtype of `q`, 0 in null rows; computed in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(q.device)
    args.check("q", q, "B H D", FLOATS)
    _check_cache(args, k_cache, v_cache, kv_of_head, window)
    args.check("block_tables", block_tables, "B M", INT64)
    args.check("seq_lens", seq_lens, "B", INT32)
    out: Tensor = implementation("paged_attention", q.device).paged_attention_decode(
        q,
        k_cache,
        v_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scale=scale,
        kv_of_head=kv_of_head,
        window=window,
    )
    return out


def _check_cache(
    args: Arguments,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_of_head: Tensor | None,
    window: int | None,
) -> None:
    args.check_units("k_cache", k_cache, "NB KH BS D", FLOATS)
    args.check_units("v_cache", v_cache, "NB KH BS D", FLOATS)
    args.check_head_map("kv_of_head", kv_of_head, "H", "KH", "k_cache")
    if window is not None and window < 1:
        raise KernelError(f"window: expected at least 1 or None, got {window}")
