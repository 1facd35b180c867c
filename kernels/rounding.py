"""Stochastic rounding of recurrent states to 16-bit floats.

The random bits of an element come from (seed, absolute position, layer, element) alone: the same
state is stored whatever the slot, the batch, the device, the instruction set or the number of ranks
is. native/include/rounding.h gives the same bits.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_GOLDEN: Final = 0x9E3779B9
_LARGEST: Final = {torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float16: 65504.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticRounding:
    """Where the random bits of a call come from.

    Args:
        seeds: (R,) int64, one per row.
        positions: (R,) int64, absolute position of the first token of each row.
        layer: index of the layer in the model.
        first_element: where this rank's elements start in the state of the whole layer.
    """

    seeds: Tensor
    positions: Tensor
    layer: int
    first_element: int = 0

    def bits(self, row: int, shape: torch.Size, *, offset: int = 0) -> Tensor:
        """Random 32-bit numbers for the state after token `offset` of a row, int64 of `shape`."""
        key = _row_key(int(self.seeds[row]), int(self.positions[row]) + offset, self.layer)
        elements = torch.arange(shape.numel(), device=self.seeds.device) + self.first_element
        hashed = _mix((elements & _WORD) ^ key)
        return (hashed ^ _mix_word((key + _GOLDEN) & _WORD)).view(shape)


def round_stochastically(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round up or down to a neighbour, with the probability that makes the mean exact.

    What lies beyond the largest finite value of `dtype`, and what is not finite, is rounded to
    nearest; float32 and float64 are returned as they are.

    Args:
        x: float32.
        bits: as `StochasticRounding.bits` gives them, shape of `x`.
    """
    if dtype not in _LARGEST:
        return x.to(dtype)
    size = x.abs()
    if dtype == torch.bfloat16:
        words = size.view(torch.int32).long() + (bits >> 16)
        rounded = (words & 0xFFFF0000).to(torch.int32).view(torch.float32)
    else:
        words = (size.view(torch.int32).long() + (bits >> 19)) & ~0x1FFF
        normal = words.to(torch.int32).view(torch.float32)
        steps = size * 2.0**24 + (bits >> 19).float() * 2.0**-13
        rounded = torch.where(size < 2.0**-14, steps.floor() * 2.0**-24, normal)
    rounded = torch.where(size <= _LARGEST[dtype], rounded.copysign(x), x)
    return rounded.to(dtype)


def store_state(
    target: Tensor,
    h: Tensor,
    rounding: StochasticRounding | None,
    row: int,
    *,
    offset: int = 0,
) -> None:
    """Write the whole state `h` after token `offset` of `row` to `target`, rounded as asked."""
    if rounding is None or target.dtype not in _LARGEST:
        target.copy_(h)
        return
    target.copy_(
        round_stochastically(h.float(), target.dtype, rounding.bits(row, h.shape, offset=offset))
    )


def _row_key(seed: int, position: int, layer: int) -> int:
    key = _mix_word((seed + _GOLDEN) & _WORD)
    for word in (seed >> 32, position, layer):
        key = _mix_word(key ^ (word & _WORD))
    return key


def _mix(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _WORD
    return h ^ (h >> 16)


def _mix_word(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _WORD
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _WORD
    return h ^ (h >> 16)
