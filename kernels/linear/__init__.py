"""Matrix product with a weight packed once."""

from plait.kernels.linear.op import linear, pack_weight

__all__ = ["linear", "pack_weight"]
