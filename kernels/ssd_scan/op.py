"""Checks and dispatch of ssd_scan.

T packed tokens, R rows, H heads, G groups, P head dim, N state dim, S slots, E checkpoints.
"""

import math

from torch import Tensor

from plait.kernels.arguments import BOOL, INT64, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS, WIDE_FLOATS
from plait.kernels.errors import KernelError
from plait.kernels.rounding import StochasticRounding


def ssd_scan(
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
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    group_of_head: Tensor | None = None,
    chunk_size: int = 64,
    z: Tensor | None = None,
    checkpoint_tokens: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    """Advance the recurrent state of every row over its tokens and return the mixer output.

    step_t = clamp(softplus(dt_t + dt_bias)); h_t = exp(step_t A) h_{t-1} + step_t x_t B_t^T;
    y_t = (h_t C_t + D x_t) silu(z_t). No row may read a slot that another row writes.

    Args:
        x: (T, H, P), any float dtype; tokens past the last row are ignored.
        dt: (T, H), any float dtype.
        A: (H,) float32 (or float64), negative decay rates.
        B, C: (T, G, N), any float dtype.
        state: (S, H, P, N) of any float dtype, updated in place.
        cu_seqlens: (R+1,) int32, row r is tokens cu_seqlens[r] to cu_seqlens[r+1].
        read_slots: (R,) int64, the slot of the initial state; 0 stands for zeros.
        write_slots: (R,) int64; 0 marks a null row: nothing is loaded or stored.
        has_initial_state: (R,) bool; where False the row starts from zeros.
        D, dt_bias: (H,).
        dt_softplus: take the softplus of dt + dt_bias.
        dt_limit: (least, greatest) step size.
        group_of_head: (H,) int64; None: head h uses group h // (H // G).
        chunk_size: tokens of one chunk; changes rounding and speed only. A backend may choose its
            own.
        z: (T, H, P), any float dtype; the gate of the output.
        checkpoint_tokens: (E,) int64, ascending indices of packed tokens.
        checkpoint_slots: (E,) int64; the state right after token checkpoint_tokens[e] is also
            stored in slot checkpoint_slots[e]. 0 stands for no slot; nothing is stored for a token
            outside of the live rows. A chunk ends there, hence the stored state is, bit for bit,
            the one of a call whose row ends there, if the chunks before are the same.
        rounding: for a 16-bit state: stochastic, not to nearest.
    Returns:
        (T, H, P) in the dtype of `x`, 0 in null rows; sums and state are kept in float32
        (float64 for float64) and rounded to the dtype of `state` when stored.
    Raises:
        ShapeError, DtypeError, BackendError, KernelError: names the argument.
    Source: Dao & Gu 2024 (Mamba-2, state space duality), section 6.
    """
    args = Arguments(x.device)
    args.check("x", x, "T H P", FLOATS)
    args.check("dt", dt, "T H", FLOATS)
    args.check("A", A, "H", WIDE_FLOATS)
    args.check("B", B, "T G N", FLOATS)
    args.check("C", C, "T G N", FLOATS)
    args.check_units("state", state, "S H P N", FLOATS)
    args.check_slots(read_slots, write_slots, "R")
    args.check_rows(cu_seqlens)
    args.check("has_initial_state", has_initial_state, "R", BOOL)
    if D is not None:
        args.check("D", D, "H", FLOATS)
    if dt_bias is not None:
        args.check("dt_bias", dt_bias, "H", FLOATS)
    args.check_head_map("group_of_head", group_of_head, "H", "G", "B")
    if z is not None:
        args.check("z", z, "T H P", FLOATS)
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
    if chunk_size < 1:
        raise KernelError(f"chunk_size: expected at least 1, got {chunk_size}")
    out: Tensor = implementation("ssd_scan", x.device).ssd_scan(
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
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        group_of_head=group_of_head,
        chunk_size=chunk_size,
        z=z,
        checkpoint_tokens=checkpoint_tokens,
        checkpoint_slots=checkpoint_slots,
        rounding=rounding,
    )
    return out
