"""Causal attention over keys and values in a paged cache."""

from plait.kernels.paged_attention.op import paged_attention_decode, paged_attention_prefill

__all__ = ["paged_attention_decode", "paged_attention_prefill"]
