"""The selective state space recurrence of Mamba-2 over packed sequences."""

from plait.kernels.ssd_scan.op import ssd_scan

__all__ = ["ssd_scan"]
