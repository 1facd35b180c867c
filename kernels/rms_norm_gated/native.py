"""rms_norm_gated in C; arguments as in op.py.

T packed tokens, C channels of this rank.
"""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from plait.kernels.errors import KernelError
from plait.kernels.native import NativeLibrary, dtype_code, pointer
from plait.kernels.rms_norm_gated import torch_impl

library = NativeLibrary(
    Path(__file__).with_name("native.c"),
    counting=("grouped_sum_squares", "rms_norm_gated"),
    grouped_sum_squares="piipiipipii",
    rms_norm_gated="piipiipipiipiffp",
)

# As `enum gating` in native.c.
_NO_GATE: Final = 0
_GATE_FIRST: Final = 1
_GATE_LAST: Final = 2


def grouped_sum_squares(
    x: Tensor,
    gate: Tensor | None,
    *,
    norm_before_gate: bool,
    group_of_channel: Tensor | None,
    num_groups: int,
) -> Tensor:
    if norm_before_gate:
        gate = None
    if not _has_code(x, gate):
        return torch_impl.grouped_sum_squares(
            x,
            gate,
            norm_before_gate=norm_before_gate,
            group_of_channel=group_of_channel,
            num_groups=num_groups,
        )
    x = _rows(x)
    gate = None if gate is None else _rows(gate)
    groups = None if group_of_channel is None else group_of_channel.contiguous()
    num_tokens, num_channels = x.shape
    sums = torch.empty((num_tokens, num_groups), dtype=torch.float32)
    is_bad = library.load().grouped_sum_squares(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        pointer(gate),
        0 if gate is None else gate.stride(0),
        _NO_GATE if gate is None else _GATE_FIRST,
        pointer(groups),
        num_groups,
        sums.data_ptr(),
        num_tokens,
        num_channels,
    )
    if is_bad:
        raise _no_such_group(num_groups)
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
    if not _has_code(x, gate) or weight.dtype not in (x.dtype, torch.float32):
        return torch_impl.rms_norm_gated(
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
    x, weight = _rows(x), weight.contiguous()
    gate = None if gate is None else _rows(gate)
    groups = None if group_of_channel is None else group_of_channel.contiguous()
    sum_squares = None if sum_squares is None else sum_squares.contiguous()
    gating = _GATE_LAST if norm_before_gate else _GATE_FIRST
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    is_bad = library.load().rms_norm_gated(
        x.data_ptr(),
        dtype_code(x.dtype),
        x.stride(0),
        pointer(gate),
        0 if gate is None else gate.stride(0),
        _NO_GATE if gate is None else gating,
        pointer(groups),
        num_groups,
        pointer(sum_squares),
        *x.shape,
        weight.data_ptr(),
        dtype_code(weight.dtype),
        group_width,
        eps,
        out.data_ptr(),
    )
    if is_bad:
        raise _no_such_group(num_groups)
    return out


def _has_code(x: Tensor, gate: Tensor | None) -> bool:
    """Whether C takes the dtypes: all but float64, and a gate like `x`."""
    return x.dtype != torch.float64 and (gate is None or gate.dtype == x.dtype)


def _rows(x: Tensor) -> Tensor:
    """`x`, whose rows may be apart, with adjacent channels."""
    return x if x.stride(1) == 1 else x.contiguous()


def _no_such_group(num_groups: int) -> KernelError:
    return KernelError(f"group_of_channel: expected groups from 0 to {num_groups - 1} only")
