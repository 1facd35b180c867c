"""Torch dtypes by the names that plans and configs use."""

import torch

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
