"""The step size of a selective state space model."""

import torch
import torch.nn.functional as F
from torch import Tensor


def discretise_step(
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    dtype: torch.dtype,
) -> Tensor:
    """The step size in `dtype`: bias added, softplus taken, clamped to `dt_limit`, same shape."""
    step = dt.to(dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(dtype)
    if dt_softplus:
        step = F.softplus(step)
    return step.clamp(*dt_limit)
