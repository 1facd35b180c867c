"""Attention of one rank: fused projection, rotary, paged KV, output projection."""

from collections.abc import Mapping

import torch

from plait.kernels.kv_write import kv_write
from plait.kernels.linear import linear
from plait.kernels.paged_attention import paged_attention_decode, paged_attention_prefill
from plait.kernels.rotary import rotary
from plait.worker.arena import Arena
from plait.worker.batch import Batch
from plait.worker.layers.parameters import LayerParameters
from plait.worker.plan import SectionShape, kv_kind_name
from plait.worker.spec import Attention, Rope
from plait.worker.tensors import DTYPE_NAMES, TORCH_DTYPES

Rotation = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding:
    """Frequencies of a rope setting; gives the rotation of the positions of a step."""

    def __init__(self, rope: Rope, *, device: torch.device) -> None:
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        self._frequencies = (1.0 / rope.theta**exponents).to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """(T,) -> cos and sin, (T, rotary_dim / 2) float32 each."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos(), angles.sin()


class AttentionLayer:
    """Attention over this rank's heads; the result is a partial sum over ranks, without bias."""

    def __init__(
        self,
        spec: Attention,
        parameters: LayerParameters,
        *,
        layer: int,
        kv_kinds: tuple[str, ...],
    ) -> None:
        self._spec = spec
        self._layer = layer
        shard = spec.shard(tp=parameters.tp, rank=parameters.rank)
        num_heads, num_kv_heads = shard.num_heads, shard.num_groups
        multipliers = (
            [1.0] * num_heads + [spec.key_multiplier] * num_kv_heads + [1.0] * num_kv_heads
        )
        self._qkv = parameters.linear(
            "attention.qkv_proj",
            bias="attention.qkv_proj_bias",
            in_multiplier=spec.in_multiplier,
            out_multiplier=torch.tensor(multipliers).repeat_interleave(spec.head_dim),
        )
        self._out = parameters.linear("attention.o_proj", out_multiplier=spec.out_multiplier)
        self.out_bias = parameters.scaled("attention.o_proj_bias", spec.out_multiplier)
        # From the tensors it really holds, for the plan is compared with what follows from them.
        self._num_heads = self._out.in_features // spec.head_dim
        self._num_kv_heads = (self._qkv.out_features // spec.head_dim - self._num_heads) // 2
        self._kv_of_head = (
            None
            if shard.is_regular
            else torch.tensor(shard.group_of_head, device=self._qkv.data.device)
        )
        self._kind_name = kv_kind_name(spec.window)
        self._kind = kv_kinds.index(self._kind_name)

    def sections(self, *, kv_dtype: str, block_size: int) -> tuple[SectionShape, ...]:
        """What this layer keeps in a KV block, from the tensors it really holds."""
        shape = (self._num_kv_heads, block_size, self._spec.head_dim)
        return tuple(
            SectionShape(
                kind=self._kind_name,
                layer=self._layer,
                name=name,
                dtype=DTYPE_NAMES[TORCH_DTYPES[kv_dtype]],
                shape=shape,
            )
            for name in ("k", "v")
        )

    def bind(self, arena: Arena) -> None:
        """Take this layer's views of the arena."""
        self._k_cache = arena.view(self._kind_name, self._layer, "k")
        self._v_cache = arena.view(self._kind_name, self._layer, "v")

    def forward(
        self, x: torch.Tensor, batch: Batch, rotations: Mapping[Rope, Rotation]
    ) -> torch.Tensor:
        """(T, D) -> (T, D), this rank's part of the sum."""
        spec, heads, kv_heads = self._spec, self._num_heads, self._num_kv_heads
        qkv = linear(x, self._qkv).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if spec.rope is not None:
            cos, sin = rotations[spec.rope]
            q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        kv_write(k, v, self._k_cache, self._v_cache, token_slots=batch.token_slots[self._kind])
        return linear(self._attend(q, batch).reshape(len(x), -1), self._out)

    def _attend(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Prefill rows and decode rows, each through its own kernel."""
        spec, parts, start = self._spec, [], 0
        if (prefill := batch.prefill) is not None:
            start = prefill.num_tokens
            parts.append(
                paged_attention_prefill(
                    q[:start],
                    self._k_cache,
                    self._v_cache,
                    block_tables=prefill.block_tables[self._kind],
                    cu_seqlens=prefill.cu_seqlens,
                    context_lens=prefill.context_lens,
                    scale=spec.scale,
                    kv_of_head=self._kv_of_head,
                    window=spec.window,
                )
            )
        if (decode := batch.decode) is not None:
            parts.append(
                paged_attention_decode(
                    q[start:],
                    self._k_cache,
                    self._v_cache,
                    block_tables=decode.block_tables[self._kind],
                    seq_lens=decode.seq_lens,
                    scale=spec.scale,
                    kv_of_head=self._kv_of_head,
                    window=spec.window,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
