"""Storing the keys and values of new tokens in the paged cache."""

from plait.kernels.kv_write.op import kv_write

__all__ = ["kv_write"]
