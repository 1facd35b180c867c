"""A mixture of gated experts."""

from plait.kernels.moe.op import moe, pack_experts

__all__ = ["moe", "pack_experts"]
