"""One decoder for every model: executes a `ModelSpec` over this rank's parameters."""

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding, linear

from plait.kernels.rms_norm import rms_norm
from plait.worker.arena import Arena
from plait.worker.batch import Batch
from plait.worker.collectives import TensorParallel
from plait.worker.layers.attention import AttentionLayer, RotaryEmbedding, Rotation
from plait.worker.layers.feed_forward import build_ffn
from plait.worker.layers.mamba2 import Mamba2Layer
from plait.worker.layers.parameters import LayerParameters
from plait.worker.parameters import vocab_range
from plait.worker.plan import CacheLayout, SectionShape
from plait.worker.spec import LayerSpec, ModelSpec, Rope


class Decoder:
    """The forward pass of one rank.

    Activations are replicated over ranks; every mixer and ffn gives this rank's part of a sum,
    which is reduced once per residual branch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, torch.Tensor],
        layout: CacheLayout,
        group: TensorParallel,
        *,
        decodable_vocab_size: int,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._group = group
        self._embedding = tensors["embedding"]
        self._final_norm = tensors["final_norm"]
        self._head = tensors["embedding" if spec.tie_embeddings else "head"]
        self._vocab = vocab_range(spec.vocab_size, tp=group.size, rank=group.rank)
        self._vocab_per_rank = -(-spec.vocab_size // group.size)
        self._decodable = min(decodable_vocab_size, spec.vocab_size)
        self._dtype = self._embedding.dtype
        self._rotary = {
            rope: RotaryEmbedding(rope, device=self._embedding.device)
            for layer in spec.layers
            if layer.attention is not None and (rope := layer.attention.rope) is not None
        }
        self._layers = [
            _DecoderLayer(
                layer,
                LayerParameters(tensors, f"layers.{index}.", tp=group.size, rank=group.rank),
                group,
                index=index,
                layout=layout,
                norm_eps=spec.norm_eps,
                dtype=self._dtype,
            )
            for index, layer in enumerate(spec.layers)
        ]

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
        rotations = {rope: rotary.at(batch.positions) for rope, rotary in self._rotary.items()}
        hidden = self._embed(batch.token_ids)
        for layer in self._layers:
            hidden = layer.forward(hidden, batch, rotations)
        hidden = hidden[batch.logit_rows].to(self._dtype)
        hidden = rms_norm(hidden, self._final_norm, eps=self._spec.norm_eps)
        return self._logits(hidden)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel embedding: a rank gives zeros for the ids of others."""
        start, stop = self._vocab
        mine = (token_ids >= start) & (token_ids < stop)
        if self._group.size == 1:
            hidden = embedding(token_ids, self._embedding)
        elif stop > start:
            hidden = embedding((token_ids - start) * mine, self._embedding) * mine[:, None]
        else:
            shape = (len(token_ids), self._spec.hidden_dim)
            hidden = torch.zeros(shape, dtype=self._dtype, device=token_ids.device)
        hidden = self._group.all_reduce(hidden)
        if self._spec.embedding_multiplier != 1.0:
            hidden = hidden * self._spec.embedding_multiplier
        return hidden.float() if self._spec.residual_in_fp32 else hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self._head)
        pad = self._vocab_per_rank - logits.shape[-1]
        if pad:
            logits = torch.nn.functional.pad(logits, (0, pad))
        logits = self._group.all_gather(logits)[:, : self._spec.vocab_size].float()
        logits = logits * self._spec.logits_multiplier
        logits[:, self._decodable :] = -torch.inf
        return logits


class _DecoderLayer:
    """norm -> mixer(s) -> residual, then norm -> ffn -> residual."""

    def __init__(
        self,
        spec: LayerSpec,
        parameters: LayerParameters,
        group: TensorParallel,
        *,
        index: int,
        layout: CacheLayout,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._group = group
        self._eps = norm_eps
        self._dtype = dtype
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
            Mamba2Layer(spec.mamba2, parameters, group, layer=index) if spec.mamba2 else None
        )
        self._ffn = build_ffn(spec.ffn, parameters)
        self._mixers = [m for m in (self._attention, self._mamba2) if m is not None]
        self._mixer_biases = [m.out_bias for m in self._mixers if m.out_bias is not None]

    def sections(self, layout: CacheLayout) -> tuple[SectionShape, ...]:
        dtypes = layout.dtypes
        sections: tuple[SectionShape, ...] = ()
        if self._attention is not None:
            sections += self._attention.sections(kv_dtype=dtypes.kv, block_size=layout.block_size)
        if self._mamba2 is not None:
            sections += self._mamba2.sections(conv_dtype=dtypes.conv, ssm_dtype=dtypes.ssm)
        return sections

    def bind(self, arena: Arena) -> None:
        for mixer in self._mixers:
            mixer.bind(arena)

    def forward(
        self, hidden: torch.Tensor, batch: Batch, rotations: Mapping[Rope, Rotation]
    ) -> torch.Tensor:
        x = rms_norm(hidden.to(self._dtype), self._input_norm, eps=self._eps)
        parts = []
        if self._attention is not None:
            parts.append(self._attention.forward(x, batch, rotations))
        if self._mamba2 is not None:
            parts.append(self._mamba2.forward(x, batch))
        partial = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        hidden = self._add(hidden, partial, self._mixer_biases)
        if self._ffn is None or self._ffn_norm is None:
            return hidden
        x = rms_norm(hidden.to(self._dtype), self._ffn_norm, eps=self._eps)
        bias = self._ffn.out_bias
        return self._add(hidden, self._ffn.forward(x), [] if bias is None else [bias])

    def _add(
        self, hidden: torch.Tensor, partial: torch.Tensor, biases: list[torch.Tensor]
    ) -> torch.Tensor:
        """Sum the ranks' parts, add the biases once, and add to the residual stream."""
        branch = self._group.all_reduce(partial)
        for bias in biases:
            branch = branch + bias
        if self._spec.residual_multiplier != 1.0:
            branch = branch * self._spec.residual_multiplier
        return hidden + branch
