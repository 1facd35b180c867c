"""moe as one pair of matrix products per expert that is hit; arguments as in op.py.

T packed tokens, D model dim, E experts, K experts of a token, I intermediate dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype
from plait.kernels.linear.packed import Quantization, quantize_int8
from plait.kernels.moe.packed import PackedExperts


def pack_experts(
    w_in: Tensor, w_out: Tensor, *, quantization: Quantization | None = None
) -> PackedExperts:
    num_experts, model_dim, intermediate_dim = w_out.shape
    dtype, in_scale, out_scale = w_in.dtype, None, None
    if quantization is not None:
        w_in, in_scale = quantize_experts(w_in)
        w_out, out_scale = quantize_experts(w_out)
    return PackedExperts(
        w_in=w_in,
        w_out=w_out,
        in_scale=in_scale,
        out_scale=out_scale,
        num_experts=num_experts,
        model_dim=model_dim,
        intermediate_dim=intermediate_dim,
        dtype=dtype,
        quantization=quantization,
    )


def quantize_experts(weights: Tensor) -> tuple[Tensor, Tensor]:
    """(E, O, K) -> int8 (E, O, K) and float32 scales (E, O)."""
    integers, scale = quantize_int8(weights.flatten(0, 1))
    return integers.view(weights.shape), scale.view(weights.shape[:2])


def expert(experts: PackedExperts, index: int) -> tuple[Tensor, Tensor]:
    """The two weights of one expert, (2I, D) and (D, I), in the model dtype."""
    w_in, w_out = experts.w_in[index].to(experts.dtype), experts.w_out[index].to(experts.dtype)
    if experts.in_scale is not None and experts.out_scale is not None:
        w_in = w_in * experts.in_scale[index, :, None].to(experts.dtype)
        w_out = w_out * experts.out_scale[index, :, None].to(experts.dtype)
    return w_in, w_out


def moe(x: Tensor, experts: PackedExperts, *, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    by_expert = expert_ids.flatten().argsort(stable=True)  # (T * K,)
    tokens = by_expert // expert_ids.shape[1]
    weights = expert_weights.flatten()[by_expert].to(dtype)
    counts = torch.bincount(expert_ids.flatten(), minlength=experts.num_experts)
    total = x.new_zeros(x.shape, dtype=dtype)
    stop = 0
    for index, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        start, stop = stop, stop + count
        hit = tokens[start:stop]
        w_in, w_out = expert(experts, index)
        gate, up = F.linear(x[hit], w_in).to(dtype).chunk(2, dim=1)  # (count, I) each
        y = F.linear((F.silu(gate) * up).to(x.dtype), w_out)  # (count, D)
        total.index_add_(0, hit, y.to(dtype) * weights[start:stop, None])
    return total.to(x.dtype)
