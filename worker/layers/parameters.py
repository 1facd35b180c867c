"""The parameters of one rank, as its layers take them."""

from collections.abc import MutableMapping

import torch
from torch import Tensor

from plait.kernels.linear import pack_weight
from plait.kernels.linear.packed import PackedWeight, Quantization
from plait.kernels.moe import pack_experts
from plait.kernels.moe.packed import PackedExperts

Parameters = MutableMapping[str, Tensor | PackedWeight | PackedExperts]


class LayerParameters:
    """A view of a rank's parameters under the prefix of one layer.

    A weight that `linear` multiplies with is packed when its layer asks for it, and the packed form
    takes the tensor's place in `parameters`: no weight is held twice.
    """

    def __init__(
        self,
        parameters: Parameters,
        prefix: str = "",
        *,
        tp: int,
        rank: int,
        quantization: Quantization | None = None,
    ) -> None:
        self._parameters = parameters
        self._prefix = prefix
        self._quantization = quantization
        self.tp = tp
        self.rank = rank

    def tensor(self, name: str) -> Tensor:
        value = self._parameters[self._prefix + name]
        assert isinstance(value, Tensor), f"{name} is packed"
        return value

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if self._prefix + name in self._parameters else None

    def scaled(self, name: str, multiplier: float) -> Tensor | None:
        """An optional bias times the multiplier of the output that it is added to."""
        bias = self.optional(name)
        return bias if bias is None or multiplier == 1.0 else bias * multiplier

    def linear(
        self,
        name: str,
        *,
        bias: str | None = None,
        in_multiplier: float = 1.0,
        out_multiplier: Tensor | float = 1.0,
        quantize: bool = True,
    ) -> PackedWeight:
        """The weight `name` for ((x * in_multiplier) @ W.T + bias) * out_multiplier.

        Args:
            bias: name of an optional bias.
            out_multiplier: a number, or one for every output.
            quantize: False for a weight that stays exact whatever the settings say.
        """
        weight = self.tensor(name)
        factor = torch.as_tensor(out_multiplier, dtype=torch.float32, device=weight.device)
        scale = in_multiplier * factor
        added = None if bias is None else self.optional(bias)
        packed = pack_weight(
            weight,
            bias=None if added is None else added * factor,
            scale=None if bool((scale == 1.0).all()) else scale.expand(len(weight)),
            quantization=self._quantization if quantize else None,
        )
        self._parameters[self._prefix + name] = packed
        return packed

    def experts(self, w_in: str, w_out: str) -> PackedExperts:
        """The weights of routed experts; both stand in the place of the first."""
        packed = pack_experts(
            self.tensor(w_in), self.tensor(w_out), quantization=self._quantization
        )
        self._parameters[self._prefix + w_in] = packed
        del self._parameters[self._prefix + w_out]
        return packed
