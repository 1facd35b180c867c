"""The weights of routed experts in the form that their backend multiplies fastest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.kernels.linear.packed import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """What `pack_experts` made of E experts; only the backend that made it reads the tensors.

    Scales are float32, of every output of every expert; None where all are 1.
    """

    w_in: Tensor
    w_out: Tensor
    in_scale: Tensor | None
    out_scale: Tensor | None
    num_experts: int
    model_dim: int
    intermediate_dim: int
    dtype: torch.dtype
    quantization: Quantization | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, scales included."""
        parts = (self.w_in, self.w_out, self.in_scale, self.out_scale)
        return sum(part.nbytes for part in parts if part is not None)
