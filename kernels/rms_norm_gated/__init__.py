"""Root mean square normalisation by channel groups, with a gate."""

from plait.kernels.rms_norm_gated.op import grouped_sum_squares, rms_norm_gated

__all__ = ["grouped_sum_squares", "rms_norm_gated"]
