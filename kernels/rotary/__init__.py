"""Rotary position embedding."""

from plait.kernels.rotary.op import rotary

__all__ = ["rotary"]
