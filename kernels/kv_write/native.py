"""kv_write in C; arguments as in op.py.

T packed tokens, KH kv heads, D attention head dim, NB blocks, BS block size in tokens.
"""

from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.kv_write import torch_impl
from plait.kernels.native import NativeLibrary, dtype_code

library = NativeLibrary(Path(__file__).with_name("native.c"), kv_write="piiipiiipiipiipiiii")


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, token_slots: Tensor
) -> None:
    if torch.float64 in (k.dtype, v.dtype, k_cache.dtype, v_cache.dtype):
        torch_impl.kv_write(k, v, k_cache, v_cache, token_slots=token_slots)
        return
    k, v, token_slots = _dense(k), _dense(v), token_slots.contiguous()
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    library.load().kv_write(
        k.data_ptr(),
        dtype_code(k.dtype),
        k_token,
        k_head,
        v.data_ptr(),
        dtype_code(v.dtype),
        v_token,
        v_head,
        k_cache.data_ptr(),
        dtype_code(k_cache.dtype),
        k_cache.stride(0),
        v_cache.data_ptr(),
        dtype_code(v_cache.dtype),
        v_cache.stride(0),
        token_slots.data_ptr(),
        len(k),
        num_kv_heads,
        block_size,
        head_dim,
    )


def _dense(x: Tensor) -> Tensor:
    """`x`, whose tokens and heads may be apart, with adjacent elements of a head."""
    return x if x.stride(2) == 1 else x.contiguous()
