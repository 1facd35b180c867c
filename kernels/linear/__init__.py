"""Matrix product with a weight packed once."""

from plait.kernels.linear.op import linear, pack_weight
from plait.kernels.linear.packed import PackedWeight, Quantization

__all__ = ["PackedWeight", "Quantization", "linear", "pack_weight"]
