"""kv_write as one indexed store; arguments as in op.py.

T packed tokens, KH kv heads, D attention head dim, NB blocks, BS block size in tokens.
"""

from torch import Tensor


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, token_slots: Tensor
) -> None:
    block_size = k_cache.shape[2]
    live = (token_slots >= block_size).nonzero().squeeze(1)
    slots = token_slots[live]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[live].to(k_cache.dtype)  # (T, KH, D)
    v_cache[block, :, offset] = v[live].to(v_cache.dtype)
