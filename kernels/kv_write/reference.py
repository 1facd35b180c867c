"""kv_write token by token; arguments as in op.py."""

from torch import Tensor


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, token_slots: Tensor
) -> None:
    block_size = k_cache.shape[2]
    for token, slot in enumerate(token_slots.tolist()):
        if slot < block_size:
            continue
        k_cache[slot // block_size, :, slot % block_size] = k[token].to(k_cache.dtype)
        v_cache[slot // block_size, :, slot % block_size] = v[token].to(v_cache.dtype)
