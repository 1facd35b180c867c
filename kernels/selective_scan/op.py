"""Checks and dispatch of selective_scan.

T packed tokens, R rows, C channels, N state dim, S slots, E checkpoints.
"""

import math

from torch import Tensor

from plait.kernels.arguments import BOOL, INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS, WIDE_FLOATS
from plait.kernels.errors import KernelError
from plait.kernels.rounding import StochasticRounding


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    """Advance the recurrent state of every row over its tokens and return the mixer output.

    step_t = clamp(softplus(dt_t + dt_bias)); h_t = exp(step_t A) h_{t-1} + step_t x_t B_t^T, where
    every state element of every channel has a decay of its own; y_t = (h_t C_t + D x_t) silu(z_t).
    No row may read a slot that another row writes, or that a checkpoint does.

    Args:
        x: (T, C), any float dtype; tokens past the last row are ignored.
        dt: (T, C), any float dtype.
        A: (C, N) float32 (or float64), negative decay rates.
        B, C: (T, N), any float dtype.
        state: (S, C, N) of any float dtype, updated in place.
        cu_seqlens: (R+1,) int32, row r is tokens cu_seqlens[r] to cu_seqlens[r+1].
        read_slots: (R,) int64, the slot of the state before the row; 0 stands for zeros.
        write_slots: (R,) int64; 0 marks a null row: nothing is loaded or stored.
        has_initial_state: (R,) bool; where False the row starts from zeros.
        D, dt_bias: (C,).
        z: (T, C), any float dtype; the gate of the output.
        dt_softplus: take the softplus of dt + dt_bias.
        dt_limit: (least, greatest) step size.
        checkpoint_tokens: (E,) int64, ascending indices of packed tokens.
        checkpoint_slots: (E,) int64; the state right after token checkpoint_tokens[e] is also
            stored in slot checkpoint_slots[e]. 0 stands for no slot; nothing is stored for a token
            outside of the live rows.
        rounding: for a 16-bit state: stochastic, not to nearest.
    Returns:
        (T, C) in the dtype of `x`, 0 in null rows; sums and state are kept in float32
        (float64 for float64) and rounded to the dtype of `state` when stored.
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    Source: Gu & Dao 2023 (Mamba), algorithm 2; reference in reference.py.
    """
    args = Arguments(x.device)
    args.check("x", x, "T C", FLOATS)
    args.check("dt", dt, "T C", FLOATS)
    args.check("A", A, "C N", WIDE_FLOATS)
    args.check("B", B, "T N", FLOATS)
    args.check("C", C, "T N", FLOATS)
    args.check_units("state", state, "S C N", FLOATS)
    args.check_slots(read_slots, write_slots, "R")
    args.check_rows(cu_seqlens)
    args.check("has_initial_state", has_initial_state, "R", BOOL)
    if D is not None:
        args.check("D", D, "C", FLOATS)
    if z is not None:
        args.check("z", z, "T C", FLOATS)
    if dt_bias is not None:
        args.check("dt_bias", dt_bias, "C", FLOATS)
    if (checkpoint_tokens is None) != (checkpoint_slots is None):
        raise KernelError("checkpoint_tokens, checkpoint_slots: expected both or none, got one")
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        args.check("checkpoint_tokens", checkpoint_tokens, "E", INT64)
        args.check("checkpoint_slots", checkpoint_slots, "E", INT64)
        if (checkpoint_tokens[1:] < checkpoint_tokens[:-1]).any():
            raise KernelError(
                f"checkpoint_tokens: expected ascending tokens, got {checkpoint_tokens.tolist()}"
            )
    args.check_rounding(rounding, "R")
    out: Tensor = implementation("selective_scan", x.device).selective_scan(
        x,
        dt,
        A,
        B,
        C,
        state,
        cu_seqlens=cu_seqlens,
        read_slots=read_slots,
        write_slots=write_slots,
        has_initial_state=has_initial_state,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_slots=checkpoint_slots,
        rounding=rounding,
    )
    return out
