"""Depthwise causal convolution over packed sequences, with its state in cache slots."""

from plait.kernels.causal_conv1d.op import causal_conv1d_prefill, causal_conv1d_update

__all__ = ["causal_conv1d_prefill", "causal_conv1d_update"]
