"""The dtypes that kernels take, and the one they accumulate in."""

from typing import Final

import torch

FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDE_FLOATS: Final = (torch.float64, torch.float32)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over inputs of `dtype` are kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
