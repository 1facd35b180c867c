"""silu_and_mul over all tokens at once; arguments as in op.py.

T packed tokens, I intermediate dim.
"""

import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def silu_and_mul(x: Tensor, *, gate_multiplier: float = 1.0) -> Tensor:
    gate, up = x.to(accumulate_dtype(x.dtype)).chunk(2, dim=1)  # (T, I) each
    if gate_multiplier != 1.0:
        gate = gate * gate_multiplier
    return (F.silu(gate) * up).to(x.dtype)
