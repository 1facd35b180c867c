"""rms_norm over all tokens at once; arguments as in op.py.

T packed tokens, D model dim.
"""

from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    values = x.to(accumulate_dtype(x.dtype))
    inverse_rms = (values.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()  # (T, 1)
    return (weight * (values * inverse_rms).to(x.dtype)).to(x.dtype)
