"""selective_scan in C; float64 goes through torch. Arguments as in op.py."""

import math
from pathlib import Path

import torch
from torch import Tensor

from plait.kernels.native import NativeLibrary, dtype_code, pointer
from plait.kernels.rounding import StochasticRounding
from plait.kernels.selective_scan import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    selective_scan="pipippipipii" + "piippppp" + "ippiffiii" + "ppippii",
)


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
    given = [x, dt, B, C] if z is None else [x, dt, B, C, z]
    dtypes = {value.dtype for value in given}
    if torch.float64 in (*dtypes, A.dtype, state.dtype):
        return torch_impl.selective_scan(
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
    out_dtype = dtype = x.dtype
    if len(dtypes) > 1:  # rare: all in the widest
        dtype = torch.float32
    # Tensors keep their names until the call is over: some are copies.
    x, dt, B, C = _tokens(x, dtype), _tokens(dt, dtype), _tokens(B, dtype), _tokens(C, dtype)
    z = None if z is None else _tokens(z, dtype)
    A, D, dt_bias = A.contiguous(), _floats(D), _floats(dt_bias)
    cu_seqlens, has_initial_state = cu_seqlens.contiguous(), has_initial_state.contiguous()
    read_slots, write_slots = read_slots.contiguous(), write_slots.contiguous()
    num_checkpoints = 0
    if checkpoint_tokens is not None and checkpoint_slots is not None:
        num_checkpoints = len(checkpoint_tokens)
        checkpoint_tokens = checkpoint_tokens.contiguous()
        checkpoint_slots = checkpoint_slots.contiguous()
    seeds = None if rounding is None else rounding.seeds.contiguous()
    positions = None if rounding is None else rounding.positions.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    library.load().selective_scan(
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        A.data_ptr(),
        B.data_ptr(),
        B.stride(0),
        C.data_ptr(),
        C.stride(0),
        pointer(z),
        0 if z is None else z.stride(0),
        dtype_code(dtype),
        state.data_ptr(),
        dtype_code(state.dtype),
        state.stride(0),
        out.data_ptr(),
        cu_seqlens.data_ptr(),
        read_slots.data_ptr(),
        write_slots.data_ptr(),
        has_initial_state.data_ptr(),
        len(write_slots),
        pointer(D),
        pointer(dt_bias),
        dt_softplus,
        *dt_limit,
        *x.shape,
        A.shape[1],
        pointer(checkpoint_tokens),
        pointer(checkpoint_slots),
        num_checkpoints,
        pointer(seeds),
        pointer(positions),
        0 if rounding is None else rounding.layer,
        0 if rounding is None else rounding.first_element,
    )
    return out if dtype == out_dtype else out.to(out_dtype)


def _tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype` with any stride between tokens, contiguous inside each."""
    x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()
