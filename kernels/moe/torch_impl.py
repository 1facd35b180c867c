"""moe as one pair of matrix products per expert that is hit; arguments as in op.py.

T packed tokens, D model dim, E experts, K experts of a token, I intermediate dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.dtypes import accumulate_dtype


def moe(
    x: Tensor, w_in: Tensor, w_out: Tensor, *, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    dtype = accumulate_dtype(x.dtype)
    by_expert = expert_ids.flatten().argsort(stable=True)  # (T * K,)
    tokens = by_expert // expert_ids.shape[1]
    weights = expert_weights.flatten()[by_expert].to(dtype)
    counts: list[int] = torch.bincount(expert_ids.flatten(), minlength=len(w_in)).tolist()
    total = x.new_zeros(x.shape, dtype=dtype)
    stop = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        start, stop = stop, stop + count
        hit = tokens[start:stop]
        gate, up = F.linear(x[hit], w_in[expert]).to(dtype).chunk(2, dim=1)  # (count, I) each
        y = F.linear((F.silu(gate) * up).to(x.dtype), w_out[expert])  # (count, D)
        total.index_add_(0, hit, y.to(dtype) * weights[start:stop, None])
    return total.to(x.dtype)
