"""Root mean square normalisation, alone or behind a residual addition."""

from plait.kernels.rms_norm.op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
