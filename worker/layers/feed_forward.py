"""Feed-forward layers of one rank: gated MLP and routed experts."""

import torch

from plait.kernels.linear import linear
from plait.kernels.moe import moe
from plait.kernels.silu_and_mul import silu_and_mul
from plait.worker.layers.parameters import LayerParameters
from plait.worker.spec import Ffn, Mlp, Moe, split_range


class MlpLayer:
    """Gated MLP over this rank's channels; the result is a partial sum, without bias."""

    def __init__(self, spec: Mlp, parameters: LayerParameters) -> None:
        start, stop = split_range(spec.intermediate_dim, tp=parameters.tp, rank=parameters.rank)
        self._in = parameters.linear(
            "mlp.in_proj",
            bias="mlp.in_proj_bias",
            out_multiplier=torch.tensor([spec.gate_multiplier, 1.0]).repeat_interleave(
                stop - start
            ),
        )
        self._out = parameters.linear("mlp.out_proj", out_multiplier=spec.down_multiplier)
        self.out_bias = parameters.scaled("mlp.out_proj_bias", spec.down_multiplier)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(silu_and_mul(linear(x, self._in)), self._out)


class MoeLayer:
    """Top-k routed experts plus an optional shared MLP, summed before ranks are."""

    def __init__(self, spec: Moe, parameters: LayerParameters) -> None:
        self._spec = spec
        self._router = parameters.linear("moe.router", quantize=False)
        self._experts = parameters.experts("moe.in_proj", "moe.out_proj")
        self._shared = MlpLayer(spec.shared, parameters) if spec.shared else None
        self.out_bias = self._shared.out_bias if self._shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(x, self._router, out_dtype=torch.float32)
        top = logits.topk(self._spec.experts_per_token, dim=-1)
        weights = top.values.softmax(dim=-1).to(x.dtype)
        out = moe(x, self._experts, expert_ids=top.indices, expert_weights=weights)
        return out if self._shared is None else out + self._shared.forward(x)


def build_ffn(spec: Ffn, parameters: LayerParameters) -> MlpLayer | MoeLayer | None:
    """The layer for `spec`, None where there is no feed-forward part."""
    match spec:
        case None:
            return None
        case Mlp():
            return MlpLayer(spec, parameters)
        case Moe():
            return MoeLayer(spec, parameters)
