"""Which device ranks run on, without importing torch."""

import os
from pathlib import Path

from plait.worker.errors import ConfigError


def num_cuda_devices() -> int:
    """NVIDIA devices that this process may use, by device files and CUDA_VISIBLE_DEVICES."""
    present = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip()]))


def resolve_device(device: str, *, tensor_parallel_size: int, available: int) -> str:
    """ "cpu" or "cuda": `auto` is CUDA where every rank gets a device of its own.

    Raises:
        ConfigError: CUDA was asked for and there are too few devices.
    """
    if device == "auto":
        return "cuda" if available >= tensor_parallel_size else "cpu"
    if device == "cuda" and available < tensor_parallel_size:
        raise ConfigError(
            f"device='cuda' with tensor_parallel_size={tensor_parallel_size} needs as many CUDA "
            f"devices, and {available} are here: lower the size or use device='cpu'"
        )
    return device
