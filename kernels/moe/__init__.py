"""A mixture of gated experts."""

from plait.kernels.moe.op import moe

__all__ = ["moe"]
