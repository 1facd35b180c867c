"""Checks and dispatch of selective_state_update.

B decode batch (also the input matrix of the model), H heads, G groups, P head dim, N state dim,
S slots.
"""

import math

from torch import Tensor

from plait.kernels.arguments import Arguments
from plait.kernels.dispatch import implementation
from plait.kernels.dtypes import FLOATS, WIDE_FLOATS
from plait.kernels.rounding import StochasticRounding


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    group_of_head: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> Tensor:
    """Advance the recurrent state of every row by one token and return the mixer output.

    The recurrence is that of `ssd_scan`, and with one channel a head (P = 1) and a decay of every
    state element that of `selective_scan`. No row may read a slot that another row writes.

    Args:
        x: (B, H, P), any float dtype.
        dt: (B, H), any float dtype.
        A: (H,) or (H, N) float32 (or float64), negative decay rates.
        B, C: (B, G, N), any float dtype.
        state: (S, H, P, N) of any float dtype, updated in place.
        read_slots: (B,) int64, the slot of the state before the token; 0 stands for zeros.
        write_slots: (B,) int64; 0 marks a null row: nothing is loaded or stored.
        D, dt_bias: (H,).
        z: (B, H, P), any float dtype: the output is multiplied by silu(z).
        dt_softplus: take the softplus of dt + dt_bias.
        dt_limit: (least, greatest) step size.
        group_of_head: (H,) int64; None: head h uses group h // (H // G).
        rounding: for a 16-bit state: stochastic, not to nearest.
    Returns:
        (B, H, P) in the dtype of `x`, 0 in null rows; sums are kept in float32 (float64 for
        float64), the state is rounded to its dtype after the output is taken.
    Raises:
        ShapeError, DtypeError, BackendError: names the argument.
    Source: Gu & Dao 2023 (Mamba), algorithm 2; Dao & Gu 2024 (Mamba-2), section 3.
    """
    args = Arguments(x.device)
    args.check("x", x, "B H P", FLOATS)
    args.check("dt", dt, "B H", FLOATS)
    if A.dim() == 1:
        args.check("A", A, "H", WIDE_FLOATS)
    args.check("B", B, "B G N", FLOATS)
    args.check("C", C, "B G N", FLOATS)
    args.check_units("state", state, "S H P N", FLOATS)
    if A.dim() != 1:
        args.check("A", A, "H N", WIDE_FLOATS)
    args.check_slots(read_slots, write_slots, "B")
    if D is not None:
        args.check("D", D, "H", FLOATS)
    if z is not None:
        args.check("z", z, "B H P", FLOATS)
    if dt_bias is not None:
        args.check("dt_bias", dt_bias, "H", FLOATS)
    args.check_head_map("group_of_head", group_of_head, "H", "G", "B")
    args.check_rounding(rounding, "B")
    out: Tensor = implementation("selective_state_update", x.device).selective_state_update(
        x,
        dt,
        A,
        B,
        C,
        state,
        read_slots=read_slots,
        write_slots=write_slots,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        group_of_head=group_of_head,
        rounding=rounding,
    )
    return out
