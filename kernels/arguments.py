"""Checks of the tensors of one call against each other."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from plait.kernels.errors import BackendError, DtypeError, ShapeError
from plait.kernels.rounding import StochasticRounding

INT32 = (torch.int32,)
INT64 = (torch.int64,)
BOOL = (torch.bool,)


class Arguments:
    """The shape letters and the device of one call.

    A letter takes its size from the first tensor that uses it; every later tensor has to agree.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sizes: dict[str, int] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter]

    def define(self, letter: str, size: int) -> None:
        """Fix the size of a letter that no earlier tensor has, such as "R+1"."""
        self._sizes[letter] = size

    def check(self, name: str, value: Tensor, letters: str, dtypes: Sequence[torch.dtype]) -> None:
        """Raise unless `value` has the shape spelled by `letters`, one of `dtypes`, our device."""
        sizes, expected, shape = self._sizes, _letters(letters), value.shape
        num_known = len(sizes)
        agrees = len(expected) == len(shape)
        for letter, size in zip(expected, shape, strict=False):
            if sizes.setdefault(letter, size) != size:
                agrees = False
        if not agrees:
            known = dict(islice(sizes.items(), num_known))
            raise ShapeError(
                f"{name}: expected shape {_describe(expected, known)}, got {tuple(shape)}"
            )
        if value.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes)
            raise DtypeError(f"{name}: expected {allowed}, got {value.dtype}")
        if value.device != self.device:
            raise BackendError(f"{name}: expected a tensor on {self.device}, got {value.device}")

    def check_units(
        self, name: str, value: Tensor, letters: str, dtypes: Sequence[torch.dtype]
    ) -> None:
        """Check cache memory: any stride between units (axis 0), each unit contiguous inside."""
        self.check(name, value, letters, dtypes)
        if value.shape[0] > 0 and not value.is_contiguous() and not value[0].is_contiguous():
            raise ShapeError(
                f"{name}: expected contiguous dims after the first, got strides {value.stride()} "
                f"for shape {tuple(value.shape)}"
            )

    def check_slots(self, read_slots: Tensor, write_slots: Tensor, letter: str) -> None:
        """Check the state slots of the rows counted by `letter`."""
        self.check("read_slots", read_slots, letter, INT64)
        if write_slots is not read_slots:
            self.check("write_slots", write_slots, letter, INT64)

    def check_rows(self, cu_seqlens: Tensor) -> None:
        """Check the bounds of R packed rows; R is known from an earlier tensor."""
        self.define("R+1", self["R"] + 1)
        self.check("cu_seqlens", cu_seqlens, "R+1", INT32)

    def check_rounding(self, rounding: StochasticRounding | None, letter: str) -> None:
        """Check the seeds and positions of the rows counted by `letter`."""
        if rounding is not None:
            self.check("rounding.seeds", rounding.seeds, letter, INT64)
            self.check("rounding.positions", rounding.positions, letter, INT64)

    def check_head_map(
        self, name: str, value: Tensor | None, heads: str, targets: str, tensor: str
    ) -> None:
        """Check the map from `heads` to `targets`; without one, `targets` must divide `heads`."""
        if value is not None:
            self.check(name, value, heads, INT64)
        elif self[targets] == 0 or self[heads] % self[targets]:
            raise ShapeError(
                f"{tensor}: expected {targets} to divide {heads}={self[heads]} when {name} is "
                f"None, got {targets}={self[targets]}"
            )


@cache
def _letters(spelled: str) -> tuple[str, ...]:
    return tuple(spelled.split())


def _describe(letters: Sequence[str], known: Mapping[str, int]) -> str:
    parts = (f"{letter}={known[letter]}" if letter in known else letter for letter in letters)
    return f"({', '.join(parts)})"
