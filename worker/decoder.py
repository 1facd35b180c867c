"""One decoder for every model: executes a `ModelSpec` over this rank's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, pad

from plait.kernels.linear import linear
from plait.kernels.linear.packed import Quantization
from plait.kernels.rms_norm import add_rms_norm, rms_norm
from plait.worker.arena import Arena
from plait.worker.batch import Batch
from plait.worker.collectives import TensorParallel
from plait.worker.layers.attention import AttentionLayer, RotaryEmbedding, Rotation
from plait.worker.layers.feed_forward import build_ffn
from plait.worker.layers.mamba2 import Mamba2Layer
from plait.worker.layers.parameters import LayerParameters, Parameters
from plait.worker.parameters import vocab_range
from plait.worker.plan import CacheLayout, SectionShape
from plait.worker.spec import LayerSpec, ModelSpec, Rope

Rotations = Mapping[Rope, Rotation]


class Decoder:
    """The forward pass of one rank.

    Activations are replicated over ranks; every mixer and ffn gives this rank's part of a sum,
    which is reduced once per residual branch. `parameters` belongs to the decoder from then on:
    weights in it are replaced by their packed form. With a `rounding_seed` SSM states of 16 bits
    are rounded stochastically.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        layout: CacheLayout,
        group: TensorParallel,
        *,
        decodable_vocab_size: int,
        quantization: Quantization | None = None,
        rounding_seed: int | None = None,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._group = group

        def under(prefix: str) -> LayerParameters:
            return LayerParameters(
                parameters, prefix, tp=group.size, rank=group.rank, quantization=quantization
            )

        model = under("")
        self._embedding = model.tensor("embedding")
        self._dtype = self._embedding.dtype
        if spec.tie_embeddings:  # looked up by row, multiplied with in a packed form of its own
            parameters["head"] = self._embedding
        self._head = model.linear("head", out_multiplier=spec.logits_multiplier)
        self._vocab = vocab_range(spec.vocab_size, tp=group.size, rank=group.rank)
        self._vocab_per_rank = -(-spec.vocab_size // group.size)
        self._decodable = min(decodable_vocab_size, spec.vocab_size)
        self._rotary = {
            rope: RotaryEmbedding(rope, device=self._embedding.device)
            for layer in spec.layers
            if layer.attention is not None and (rope := layer.attention.rope) is not None
        }
        self._layers = [
            _DecoderLayer(
                layer,
                under(f"layers.{index}."),
                group,
                index=index,
                layout=layout,
                rounding_seed=rounding_seed,
            )
            for index, layer in enumerate(spec.layers)
        ]
        self._branches = [branch for layer in self._layers for branch in layer.branches()]
        self._norms = [branch.norm for branch in self._branches] + [model.tensor("final_norm")]

    def sections(self) -> tuple[SectionShape, ...]:
        """What the built layers keep in the cache, from the tensors they hold."""
        return tuple(section for layer in self._layers for section in layer.sections(self._layout))

    def bind(self, arena: Arena) -> None:
        """Give every layer its views of the arena."""
        for layer in self._layers:
            layer.bind(arena)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run a batch: (T,) tokens -> (R, vocab_size) float32 logits of the wanted rows.

        State and KV of the batch's sequences are advanced in place. Ids that cannot be decoded
        are -inf.
        """
        eps = self._spec.norm_eps
        wants_some = len(batch.logit_rows) != len(batch.token_ids)
        rotations = {rope: rotary.at(batch.positions) for rope, rotary in self._rotary.items()}
        hidden = self._embed(batch.token_ids)
        x = rms_norm(hidden.to(self._dtype), self._norms[0], eps=eps)
        for branch, next_norm in zip(self._branches, self._norms[1:], strict=True):
            if branch is self._branches[-1] and not branch.has_state and wants_some:
                # Nothing after here depends on other tokens.
                hidden, x = hidden[batch.logit_rows], x[batch.logit_rows]
            part = self._group.all_reduce(branch.forward(x, batch, rotations))
            for bias in branch.biases:
                part = part + bias
            x = add_rms_norm(part, hidden, next_norm, eps=eps, scale=branch.scale)
        if len(x) != len(batch.logit_rows):
            x = x[batch.logit_rows]
        return self._logits(x)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel embedding: a rank gives zeros for the ids of others."""
        start, stop = self._vocab
        if self._group.size == 1:
            hidden = embedding(token_ids, self._embedding)
        elif stop > start:
            mine = (token_ids >= start) & (token_ids < stop)
            hidden = embedding((token_ids - start) * mine, self._embedding) * mine[:, None]
        else:
            shape = (len(token_ids), self._spec.hidden_dim)
            hidden = torch.zeros(shape, dtype=self._dtype, device=token_ids.device)
        hidden = self._group.all_reduce(hidden)
        if self._spec.embedding_multiplier != 1.0:
            hidden = hidden * self._spec.embedding_multiplier
        return hidden.float() if self._spec.residual_in_fp32 else hidden

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(x, self._head, out_dtype=torch.float32)
        if self._group.size > 1:
            logits = pad(logits, (0, self._vocab_per_rank - logits.shape[-1]))
            logits = self._group.all_gather(logits)[:, : self._spec.vocab_size]
        if self._decodable < logits.shape[-1]:
            logits[:, self._decodable :] = -torch.inf
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """norm -> mixer(s) or ffn -> residual. `forward` gives this rank's part of the sum."""

    norm: torch.Tensor
    forward: Callable[[torch.Tensor, Batch, Rotations], torch.Tensor]
    biases: tuple[torch.Tensor, ...]
    scale: float
    has_state: bool


class _DecoderLayer:
    """One or two mixers side by side, then the ffn if there is one."""

    def __init__(
        self,
        spec: LayerSpec,
        parameters: LayerParameters,
        group: TensorParallel,
        *,
        index: int,
        layout: CacheLayout,
        rounding_seed: int | None,
    ) -> None:
        self._scale = spec.residual_multiplier
        self._input_norm = parameters.tensor("input_norm")
        self._ffn_norm = parameters.optional("ffn_norm")
        self._attention = (
            AttentionLayer(
                spec.attention,
                parameters,
                layer=index,
                kv_kinds=tuple(kind.name for kind in layout.kv_kinds),
            )
            if spec.attention
            else None
        )
        self._mamba2 = (
            Mamba2Layer(spec.mamba2, parameters, group, layer=index, rounding_seed=rounding_seed)
            if spec.mamba2
            else None
        )
        self._ffn = build_ffn(spec.ffn, parameters)

    def branches(self) -> list[_Branch]:
        """What is added to the residual stream, in order."""
        mixers = (self._attention, self._mamba2)
        biases = (mixer.out_bias for mixer in mixers if mixer is not None)
        mixer = _Branch(
            norm=self._input_norm,
            forward=self._mix,
            biases=tuple(bias for bias in biases if bias is not None),
            scale=self._scale,
            has_state=True,
        )
        if self._ffn is None or self._ffn_norm is None:
            return [mixer]
        ffn = self._ffn
        return [
            mixer,
            _Branch(
                norm=self._ffn_norm,
                forward=lambda x, batch, rotations: ffn.forward(x),
                biases=() if ffn.out_bias is None else (ffn.out_bias,),
                scale=self._scale,
                has_state=False,
            ),
        ]

    def sections(self, layout: CacheLayout) -> tuple[SectionShape, ...]:
        dtypes = layout.dtypes
        sections: tuple[SectionShape, ...] = ()
        if self._attention is not None:
            sections += self._attention.sections(kv_dtype=dtypes.kv, block_size=layout.block_size)
        if self._mamba2 is not None:
            sections += self._mamba2.sections(conv_dtype=dtypes.conv, ssm_dtype=dtypes.ssm)
        return sections

    def bind(self, arena: Arena) -> None:
        for mixer in (self._attention, self._mamba2):
            if mixer is not None:
                mixer.bind(arena)

    def _mix(self, x: torch.Tensor, batch: Batch, rotations: Rotations) -> torch.Tensor:
        parts = []
        if self._attention is not None:
            parts.append(self._attention.forward(x, batch, rotations))
        if self._mamba2 is not None:
            parts.append(self._mamba2.forward(x, batch))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
