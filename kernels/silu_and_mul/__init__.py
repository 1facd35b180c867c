"""The activation of a gated feed-forward layer."""

from plait.kernels.silu_and_mul.op import silu_and_mul

__all__ = ["silu_and_mul"]
