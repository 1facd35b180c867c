"""The selective scan of Mamba-1 over packed rows."""

from plait.kernels.selective_scan.op import selective_scan

__all__ = ["selective_scan"]
