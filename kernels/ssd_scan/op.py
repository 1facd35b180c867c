"""Checks and dispatch of ssd_scan.

T packed tokens, R rows, H heads, G groups, P head dim, N state dim, S slots.
"""

import math

from torch import Tensor

from plait.kernels.arguments import BOOL, Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS, WIDE_FLOATS
from plait.kernels.errors import KernelError


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
) -> Tensor:
    """Advance the recurrent state of every row over its tokens and return the mixer output.

    step_t = clamp(softplus(dt_t + dt_bias)); h_t = exp(step_t A) h_{t-1} + step_t x_t B_t^T;
    y_t = h_t C_t + D x_t. No row may read a slot that another row writes.

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
        chunk_size: tokens of one chunk; changes rounding and speed only.
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
    )
    return out
