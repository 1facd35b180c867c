"""The parameters of one layer of one rank, by their names inside the layer."""

from collections.abc import Mapping

import torch


class LayerParameters:
    """A view of a rank's parameters under the prefix of one layer."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], prefix: str, *, tp: int, rank: int
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self.tp = tp
        self.rank = rank

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def optional(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self._prefix + name)

    def scaled(self, name: str, multiplier: float) -> torch.Tensor | None:
        """An optional bias times the multiplier of the output that it is added to."""
        bias = self.optional(name)
        return bias if bias is None or multiplier == 1.0 else bias * multiplier
