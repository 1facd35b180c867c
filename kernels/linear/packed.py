"""A weight in the form that its backend multiplies fastest."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """What `pack_weight` made of an (O, K) weight; only the backend that made it reads `data`.

    `scale` and `bias` are (O,) float32: the output is scale * (x @ weight.T) + bias.
    """

    data: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    quantization: Quantization | None
    scale: Tensor | None
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, scales and bias included."""
        parts = (self.data, self.scale, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(O, K) -> int8 (O, K) and float32 scales (O,): the largest element of a row becomes 127."""
    values = weight.float()
    scale = values.abs().amax(dim=1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (values * inverse[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def merge_scales(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The product of two scales of the output, None where both are 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second
