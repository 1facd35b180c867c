"""rms_norm_gated over all tokens and groups at once; arguments as in op.py.

T packed tokens, C channels of this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def grouped_sum_squares(
    x: Tensor,
    gate: Tensor | None,
    *,
    norm_before_gate: bool,
    group_of_channel: Tensor | None,
    num_groups: int,
) -> Tensor:
    values = _values_to_norm(x, gate, norm_before_gate)
    return _sum_squares(values, group_of_channel, num_groups)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    norm_before_gate: bool = False,
    group_width: int,
    group_of_channel: Tensor | None = None,
    num_groups: int = 1,
    sum_squares: Tensor | None = None,
) -> Tensor:
    values = _values_to_norm(x, gate, norm_before_gate)
    if sum_squares is None:
        sum_squares = _sum_squares(values, group_of_channel, num_groups)
    inverse_rms = (sum_squares / group_width + eps).rsqrt()  # (T, num_groups)
    if group_of_channel is None:
        y = values * inverse_rms[:, :1]
    else:
        y = values * inverse_rms[:, group_of_channel]
    y *= weight.to(y.dtype)
    if gate is not None and norm_before_gate:
        y *= F.silu(gate.to(y.dtype))
    return y.to(x.dtype)


def _values_to_norm(x: Tensor, gate: Tensor | None, norm_before_gate: bool) -> Tensor:
    values = x.to(accumulate_dtype(x.dtype))
    if gate is None or norm_before_gate:
        return values
    return values * F.silu(gate.to(values.dtype))


def _sum_squares(values: Tensor, group_of_channel: Tensor | None, num_groups: int) -> Tensor:
    squares = values.square()
    if group_of_channel is None:
        total = squares.sum(dim=1, keepdim=True)  # (T, 1)
        return F.pad(total, (0, num_groups - 1))
    groups = torch.arange(num_groups, device=values.device)
    membership = (group_of_channel[:, None] == groups).to(values.dtype)  # (C, num_groups)
    return squares @ membership
