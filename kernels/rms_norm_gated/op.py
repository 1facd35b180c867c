"""Checks and dispatch of rms_norm_gated.

T packed tokens, C channels of this rank.
"""

from torch import Tensor

from plait.kernels.arguments import INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS, accumulate_dtype
from plait.kernels.errors import KernelError


def grouped_sum_squares(
    x: Tensor,
    gate: Tensor | None,
    *,
    norm_before_gate: bool,
    group_of_channel: Tensor | None,
    num_groups: int,
) -> Tensor:
    """Sum the squares of what `rms_norm_gated` normalises, by norm group, on this rank.

    Added over the ranks of a tensor-parallel group it is the `sum_squares` of `rms_norm_gated`.

    Args:
        x: (T, C), any float dtype.
        gate: (T, C), any float dtype.
        norm_before_gate: the gate does not enter the sum.
        group_of_channel: (C,) int64 from 0 to num_groups - 1; None: all channels are in group 0.
        num_groups: groups of the result.
    Returns:
        (T, num_groups) float32 (float64 for float64), 0 for a group without channels.
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(x.device)
    _check_groups(args, x, gate, group_of_channel, num_groups)
    sums: Tensor = implementation("rms_norm_gated", x.device).grouped_sum_squares(
        x,
        gate,
        norm_before_gate=norm_before_gate,
        group_of_channel=group_of_channel,
        num_groups=num_groups,
    )
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
    """Normalise every norm group of every token, scale its channels, apply the gate.

    norm(x silu(gate)) weight, or with `norm_before_gate` norm(x) weight silu(gate).

    Args:
        x: (T, C), any float dtype.
        gate: (T, C), any float dtype; None: no gate.
        weight: (C,), any float dtype.
        eps: added to the mean square.
        group_width: channels of one norm group over all ranks.
        group_of_channel: (C,) int64 from 0 to num_groups - 1; None: all channels are in group 0.
        num_groups: norm groups that this rank touches.
        sum_squares: (T, num_groups) of the dtype of the statistics, over all ranks; None: the
            channels here are all there are.
    Returns:
        (T, C) in the dtype of `x`; statistics and products are in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(x.device)
    _check_groups(args, x, gate, group_of_channel, num_groups)
    args.check("weight", weight, "C", FLOATS)
    if sum_squares is not None:
        args.define("num_groups", num_groups)
        args.check("sum_squares", sum_squares, "T num_groups", (accumulate_dtype(x.dtype),))
    if group_width < 1:
        raise KernelError(f"group_width: expected at least 1, got {group_width}")
    out: Tensor = implementation("rms_norm_gated", x.device).rms_norm_gated(
        x,
        gate,
        weight,
        eps=eps,
        norm_before_gate=norm_before_gate,
        group_width=group_width,
        group_of_channel=group_of_channel,
        num_groups=num_groups,
        sum_squares=sum_squares,
    )
    return out


def _check_groups(
    args: Arguments,
    x: Tensor,
    gate: Tensor | None,
    group_of_channel: Tensor | None,
    num_groups: int,
) -> None:
    args.check("x", x, "T C", FLOATS)
    if gate is not None:
        args.check("gate", gate, "T C", FLOATS)
    if group_of_channel is not None:
        args.check("group_of_channel", group_of_channel, "C", INT64)
    if num_groups < 1:
        raise KernelError(f"num_groups: expected at least 1, got {num_groups}")
