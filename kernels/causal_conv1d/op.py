"""Checks and dispatch of causal_conv1d.

T packed tokens, R rows, B decode batch, C channels, W conv width, S slots, E checkpoints.
"""

from typing import Final, Literal

from torch import Tensor

from plait.kernels.arguments import BOOL, INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS
from plait.kernels.errors import KernelError, ShapeError

_MAX_WIDTH: Final = 8

Activation = Literal["silu"] | None


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    activation: Activation = "silu",
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    """Convolve the tokens of every row and leave its last W-1 inputs in its write slot.

    No row may read a slot that another row writes, or that a checkpoint does.

    Args:
        x: (T, C), any float dtype; tokens past the last row are ignored.
        weight: (C, W) with W from 1 to 8, the tap of the newest token last.
        bias: (C,).
        state: (S, W-1, C) of any float dtype, oldest input first, updated in place.
        cu_seqlens: (R+1,) int32, row r is tokens cu_seqlens[r] to cu_seqlens[r+1].
        read_slots: (R,) int64, the slot of the inputs before the row; 0 stands for zeros.
        write_slots: (R,) int64; 0 marks a null row: nothing is loaded or stored.
        has_initial_state: (R,) bool; where False the inputs before the row are zeros.
        activation: applied to the output.
        checkpoint_tokens: (E,) int64 ascending indices of packed tokens; the state after each of
            them is stored too, as if its row ended there.
        checkpoint_slots: (E,) int64, where; 0 and tokens outside of live rows store nothing.
    Returns:
        (T, C) in the dtype of `x`, 0 in null rows; sums are kept in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(x.device)
    args.check("x", x, "T C", FLOATS)
    _check_filter(args, weight, bias, state, activation)
    args.check_slots(read_slots, write_slots, "R")
    args.check_rows(cu_seqlens)
    args.check("has_initial_state", has_initial_state, "R", BOOL)
    if (checkpoint_tokens is None) != (checkpoint_slots is None):
        raise KernelError("checkpoint_tokens, checkpoint_slots: expected both or none")
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        args.check("checkpoint_tokens", checkpoint_tokens, "E", INT64)
        args.check("checkpoint_slots", checkpoint_slots, "E", INT64)
    out: Tensor = implementation("causal_conv1d", x.device).causal_conv1d_prefill(
        x,
        weight,
        bias,
        state,
        cu_seqlens=cu_seqlens,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        activation=activation,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_slots=checkpoint_slots,
    )
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """Convolve one token of every row and shift it into the state.

    Args:
        x: (B, C), any float dtype.
        weight, bias, state, activation: as in `causal_conv1d_prefill`.
        read_slots: (B,) int64, the slot of the inputs before the token; 0 stands for zeros.
        write_slots: (B,) int64; 0 marks a null row: nothing is loaded or stored.
    Returns:
        (B, C) in the dtype of `x`, 0 in null rows; sums are kept in float32 (float64 for float64).
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    """
    args = Arguments(x.device)
    args.check("x", x, "B C", FLOATS)
    _check_filter(args, weight, bias, state, activation)
    args.check_slots(read_slots, write_slots, "B")
    out: Tensor = implementation("causal_conv1d", x.device).causal_conv1d_update(
        x,
        weight,
        bias,
        state,
        read_slots=read_slots,
        write_slots=write_slots,
        activation=activation,
    )
    return out


def _check_filter(
    args: Arguments, weight: Tensor, bias: Tensor | None, state: Tensor, activation: Activation
) -> None:
    args.check("weight", weight, "C W", FLOATS)
    if not 1 <= args["W"] <= _MAX_WIDTH:
        raise ShapeError(f"weight: expected W from 1 to {_MAX_WIDTH}, got W={args['W']}")
    if bias is not None:
        args.check("bias", bias, "C", FLOATS)
    args.define("W-1", args["W"] - 1)
    args.check_units("state", state, "S W-1 C", FLOATS)
    if activation not in ("silu", None):
        raise KernelError(f"activation: expected 'silu' or None, got {activation!r}")
