"""Mamba-2 mixer of one rank: projection, convolution, scan or update, gated norm, projection."""

import torch

from plait.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from plait.kernels.linear import linear
from plait.kernels.rms_norm_gated import grouped_sum_squares, rms_norm_gated
from plait.kernels.rounding import StochasticRounding
from plait.kernels.selective_state_update import selective_state_update
from plait.kernels.ssd_scan import ssd_scan
from plait.worker.arena import Arena
from plait.worker.batch import Batch, DecodeBatch, PrefillBatch
from plait.worker.collectives import TensorParallel
from plait.worker.layers.parameters import LayerParameters
from plait.worker.plan import STATE, SectionShape
from plait.worker.spec import Mamba2


class Mamba2Layer:
    """Mamba-2 over this rank's heads; the result is a partial sum over ranks, without bias."""

    def __init__(
        self,
        spec: Mamba2,
        parameters: LayerParameters,
        group: TensorParallel,
        *,
        layer: int,
        rounding_seed: int | None = None,
    ) -> None:
        self._spec = spec
        self._layer = layer
        self._rounding_seed = rounding_seed
        self._shard = spec.shard(tp=parameters.tp, rank=parameters.rank)
        self._in = parameters.linear(
            "mamba2.in_proj",
            bias="mamba2.in_proj_bias",
            in_multiplier=spec.in_multiplier,
            out_multiplier=self._section_multiplier(),
        )
        self._conv = parameters.tensor("mamba2.conv")
        self._conv_bias = parameters.optional("mamba2.conv_bias")
        self._decay = -torch.exp(parameters.tensor("mamba2.A_log"))
        self._skip = parameters.tensor("mamba2.D")
        self._dt_bias = parameters.tensor("mamba2.dt_bias")
        self._out = parameters.linear("mamba2.out_proj", out_multiplier=spec.out_multiplier)
        self.out_bias = parameters.scaled("mamba2.out_proj_bias", spec.out_multiplier)
        self._norm = _TensorParallelGatedNorm(spec, parameters, group) if spec.norm else None
        self._group_of_head = (
            None
            if self._shard.heads.is_regular
            else torch.tensor(self._shard.heads.group_of_head, device=self._decay.device)
        )

    def sections(self, *, conv_dtype: str, ssm_dtype: str) -> tuple[SectionShape, ...]:
        """What this layer keeps in a state slot, from the tensors it really holds."""
        spec = self._spec
        conv_dim, width = self._conv.shape
        shapes = (
            ("conv", conv_dtype, (width - 1, conv_dim)),
            ("ssm", ssm_dtype, (self._decay.shape[0], spec.head_dim, spec.state_dim)),
        )
        return tuple(
            SectionShape(kind=STATE, layer=self._layer, name=name, dtype=dtype, shape=shape)
            for name, dtype, shape in shapes
        )

    def bind(self, arena: Arena) -> None:
        """Take this layer's views of the arena."""
        self._conv_state = arena.view(STATE, self._layer, "conv")
        self._ssm_state = arena.view(STATE, self._layer, "ssm")

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(T, D) -> (T, D), this rank's part of the sum."""
        shard = self._shard
        gate, conv_in, dt = torch.split(
            linear(x, self._in), [shard.inner_dim, shard.conv_dim, shard.heads.num_heads], dim=-1
        )
        # Without a norm the gate is applied where the output is still in registers.
        z = gate.view(len(gate), -1, self._spec.head_dim) if self._norm is None else None
        parts, start = [], 0
        if (prefill := batch.prefill) is not None:
            start = prefill.num_tokens
            gated = None if z is None else z[:start]
            parts.append(self._prefill(conv_in[:start], dt[:start], gated, prefill))
        if (decode := batch.decode) is not None:
            gated = None if z is None else z[start:]
            parts.append(self._decode(conv_in[start:], dt[start:], gated, decode))
        y = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
        return linear(y if self._norm is None else self._norm(y, gate), self._out)

    def _prefill(
        self, conv_in: torch.Tensor, dt: torch.Tensor, z: torch.Tensor | None, prefill: PrefillBatch
    ) -> torch.Tensor:
        """(T, conv), (T, H) -> (T, H, P) for the prefill rows."""
        convolved = causal_conv1d_prefill(
            conv_in,
            self._conv,
            self._conv_bias,
            self._conv_state,
            cu_seqlens=prefill.cu_seqlens,
            read_slots=prefill.slots,
            write_slots=prefill.slots,
            has_initial_state=prefill.has_initial_state,
        )
        x, b, c = self._split(convolved)
        return ssd_scan(
            x,
            dt,
            self._decay,
            b,
            c,
            self._ssm_state,
            cu_seqlens=prefill.cu_seqlens,
            read_slots=prefill.slots,
            write_slots=prefill.slots,
            has_initial_state=prefill.has_initial_state,
            D=self._skip,
            z=z,
            dt_bias=self._dt_bias,
            dt_limit=self._spec.dt_limit,
            group_of_head=self._group_of_head,
            rounding=self._rounding(prefill.context_lens),
        )

    def _decode(
        self, conv_in: torch.Tensor, dt: torch.Tensor, z: torch.Tensor | None, decode: DecodeBatch
    ) -> torch.Tensor:
        """(B, conv), (B, H) -> (B, H, P) for the decode rows."""
        convolved = causal_conv1d_update(
            conv_in,
            self._conv,
            self._conv_bias,
            self._conv_state,
            read_slots=decode.slots,
            write_slots=decode.slots,
        )
        x, b, c = self._split(convolved)
        return selective_state_update(
            x,
            dt,
            self._decay,
            b,
            c,
            self._ssm_state,
            read_slots=decode.slots,
            write_slots=decode.slots,
            D=self._skip,
            z=z,
            dt_bias=self._dt_bias,
            dt_limit=self._spec.dt_limit,
            group_of_head=self._group_of_head,
            rounding=self._rounding(decode.seq_lens, offset=-1),
        )

    def _rounding(self, positions: torch.Tensor, *, offset: int = 0) -> StochasticRounding | None:
        """Random bits for the states after the tokens from `positions` (R,) + offset, if asked for.

        All sequences share one seed: what a sequence computes depends on its own tokens alone.
        """
        if self._rounding_seed is None:
            return None
        spec, heads = self._spec, self._shard.heads
        return StochasticRounding(
            seeds=torch.full_like(positions, self._rounding_seed, dtype=torch.int64),
            positions=positions.long() + offset,
            layer=self._layer,
            first_element=heads.start * spec.head_dim * spec.state_dim,
        )

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (T, H, P), B (T, G, N) and C (T, G, N) of the convolved channels."""
        shard, spec = self._shard, self._spec
        dims = [shard.inner_dim, shard.group_dim, shard.group_dim]
        x, b, c = torch.split(convolved, dims, dim=-1)
        return (
            x.view(len(x), -1, spec.head_dim),
            b.view(len(b), -1, spec.state_dim),
            c.view(len(c), -1, spec.state_dim),
        )

    def _section_multiplier(self) -> torch.Tensor:
        """The multiplier of every output of the projection."""
        sections = zip(self._shard.in_dims, self._spec.section_multipliers, strict=True)
        return torch.cat([torch.full((dim,), multiplier) for dim, multiplier in sections])


class _TensorParallelGatedNorm:
    """Gated RMS norm whose groups may span ranks: then the sums of squares are reduced first."""

    def __init__(self, spec: Mamba2, parameters: LayerParameters, group: TensorParallel) -> None:
        assert spec.norm is not None
        self._norm = spec.norm
        self._weight = parameters.tensor("mamba2.norm")
        self._group = group
        self._width = spec.inner_dim // spec.norm.num_groups
        start, stop = spec.shard(tp=parameters.tp, rank=parameters.rank).inner_range
        self._spans_ranks = (spec.inner_dim // parameters.tp) % self._width != 0
        first = 0 if self._spans_ranks else start // self._width
        self._num_groups = (
            spec.norm.num_groups if self._spans_ranks else (stop - start) // self._width
        )
        channels = torch.arange(start, stop, device=self._weight.device)
        self._group_of_channel = None if self._num_groups == 1 else channels // self._width - first

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        sum_squares = None
        if self._spans_ranks:
            sum_squares = self._group.all_reduce(
                grouped_sum_squares(
                    y,
                    gate,
                    norm_before_gate=self._norm.before_gate,
                    group_of_channel=self._group_of_channel,
                    num_groups=self._num_groups,
                )
            )
        return rms_norm_gated(
            y,
            gate,
            self._weight,
            eps=self._norm.eps,
            norm_before_gate=self._norm.before_gate,
            group_width=self._width,
            group_of_channel=self._group_of_channel,
            num_groups=self._num_groups,
            sum_squares=sum_squares,
        )
