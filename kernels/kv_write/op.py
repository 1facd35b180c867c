"""Checks and dispatch of kv_write.

T packed tokens, KH kv heads, D attention head dim, NB blocks, BS block size in tokens.
"""

from torch import Tensor

from plait.kernels.arguments import INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, token_slots: Tensor
) -> None:
    """Store the keys and values of every token at its place in the cache.

    Args:
        k, v: (T, KH, D), any float dtype.
        k_cache, v_cache: (NB, KH, BS, D) of any float dtype, updated in place.
        token_slots: (T,) int64, block * BS + offset; slots of block 0 (or below) are not written.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    """
    args = Arguments(k.device)
    args.check("k", k, "T KH D", FLOATS)
    args.check("v", v, "T KH D", FLOATS)
    args.check_units("k_cache", k_cache, "NB KH BS D", FLOATS)
    args.check_units("v_cache", v_cache, "NB KH BS D", FLOATS)
    args.check("token_slots", token_slots, "T", INT64)
    implementation("kv_write", k.device).kv_write(k, v, k_cache, v_cache, token_slots=token_slots)
