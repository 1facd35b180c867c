"""rms_norm_gated channel group by channel group; arguments as in op.py."""

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
    dtype = accumulate_dtype(x.dtype)
    values = x.to(dtype)
    if gate is not None and not norm_before_gate:
        values = values * F.silu(gate.to(dtype))
    sums = torch.zeros(len(x), num_groups, dtype=dtype, device=x.device)
    for group in range(num_groups):
        channels = _channels_of(group, x.shape[1], group_of_channel)
        sums[:, group] = values[:, channels].pow(2).sum(dim=1)
    return sums


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
    dtype = accumulate_dtype(x.dtype)
    if sum_squares is None:
        sum_squares = grouped_sum_squares(
            x,
            gate,
            norm_before_gate=norm_before_gate,
            group_of_channel=group_of_channel,
            num_groups=num_groups,
        )
    y = x.to(dtype, copy=True)
    if gate is not None:
        # The gate is one factor of the result wherever the norm is taken.
        y = y * F.silu(gate.to(dtype))
    for group in range(num_groups):
        rms = torch.sqrt(sum_squares[:, group] / group_width + eps)  # (T,)
        channels = _channels_of(group, x.shape[1], group_of_channel)
        y[:, channels] = y[:, channels] / rms[:, None]
    return (y * weight.to(dtype)).to(x.dtype)


def _channels_of(group: int, num_channels: int, group_of_channel: Tensor | None) -> list[int]:
    groups = [0] * num_channels if group_of_channel is None else group_of_channel.tolist()
    return [channel for channel in range(num_channels) if groups[channel] == group]
