"""Which tensors a rank holds, and which slices of the checkpoint make them.

Derived from a `ModelSpec` alone, without torch: the loader reads by this list, the decoder takes
its weights from it, and `plait plan` counts bytes with it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.worker.spec import (
    Attention,
    Ffn,
    LayerSpec,
    Mamba2,
    Mixer,
    Mlp,
    ModelSpec,
    Moe,
    Parallel,
    TensorPart,
    split_range,
)

# Held in float32 whatever the model dtype: the recurrence is sensitive to their rounding.
FLOAT32 = "float32"
MODEL_DTYPE = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows [start, stop) along `dim` of a stored tensor whose whole shape is `stored_shape`."""

    tensor: str
    stored_shape: tuple[int, ...]
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of a rank: its slices joined along their dimension, then given `shape`."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    dtype: str = MODEL_DTYPE

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_quantizable(self) -> bool:
        """Whether `quantization` applies: the weights of matrix products, but not the router."""
        return self.name == "head" or self.name.endswith("_proj")


def rank_parameters(spec: ModelSpec, *, tp: int, rank: int) -> tuple[Parameter, ...]:
    """Every parameter of `rank`, in the order of the forward pass."""
    return tuple(_Ranked(spec, tp, rank).model())


def vocab_range(vocab_size: int, *, tp: int, rank: int) -> tuple[int, int]:
    """The vocabulary rows of a rank; all ranks but the last ones hold ceil(vocab / tp)."""
    per_rank = -(-vocab_size // tp)
    return min(rank * per_rank, vocab_size), min((rank + 1) * per_rank, vocab_size)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Builds the parameters of one rank."""

    spec: ModelSpec
    tp: int
    rank: int

    def model(self) -> Iterator[Parameter]:
        spec, names = self.spec, self.spec.names
        rows = vocab_range(spec.vocab_size, tp=self.tp, rank=self.rank)
        table = (spec.vocab_size, spec.hidden_dim)
        yield _sliced("embedding", names.embedding, table, [rows])
        for index, layer in enumerate(spec.layers):
            prefix = names.layer.format(i=index)
            for parameter in self._layer(layer, prefix):
                yield replace(parameter, name=f"layers.{index}.{parameter.name}")
        yield _whole("final_norm", names.final_norm, (spec.hidden_dim,))
        if not spec.tie_embeddings:
            yield _sliced("head", names.head, table, [rows])

    def _layer(self, layer: LayerSpec, prefix: str) -> Iterator[Parameter]:
        names, hidden = self.spec.names, (self.spec.hidden_dim,)
        yield _whole("input_norm", prefix + names.input_norm, hidden)
        yield from self._mixer(layer.mixer, prefix)
        if layer.ffn is not None:
            yield _whole("ffn_norm", prefix + names.ffn_norm, hidden)
            yield from self._ffn(layer.ffn, prefix)

    def _mixer(self, mixer: Mixer, prefix: str) -> Iterator[Parameter]:
        match mixer:
            case Attention():
                yield from self._attention(mixer, prefix + self.spec.names.attention)
            case Mamba2():
                yield from self._mamba2(mixer, prefix + self.spec.names.mamba2)
            case Parallel():
                yield from self._mixer(mixer.attention, prefix)
                yield from self._mixer(mixer.mamba2, prefix)

    def _attention(self, mixer: Attention, prefix: str) -> Iterator[Parameter]:
        hidden, dim = self.spec.hidden_dim, mixer.head_dim
        shard = mixer.shard(tp=self.tp, rank=self.rank)
        q_rows = (shard.start * dim, shard.stop * dim)
        kv_rows = (shard.group_start * dim, shard.group_stop * dim)
        q_dim, kv_dim = mixer.num_heads * dim, mixer.num_kv_heads * dim
        rows = {"q_proj": (q_dim, q_rows), "k_proj": (kv_dim, kv_rows), "v_proj": (kv_dim, kv_rows)}
        local = q_rows[1] - q_rows[0] + 2 * (kv_rows[1] - kv_rows[0])
        kinds: list[tuple[str, str, tuple[int, ...]]] = [("qkv_proj", "weight", (hidden,))]
        if mixer.bias:
            kinds.append(("qkv_proj_bias", "bias", ()))
        for name, suffix, rest in kinds:
            yield Parameter(
                name=f"attention.{name}",
                shape=(local, *rest),
                slices=tuple(
                    Slice(
                        tensor=f"{prefix}{proj}.{suffix}",
                        stored_shape=(size, *rest),
                        dim=0,
                        start=start,
                        stop=stop,
                    )
                    for proj, (size, (start, stop)) in rows.items()
                ),
            )
        yield _sliced(
            "attention.o_proj", f"{prefix}o_proj.weight", (hidden, q_dim), [q_rows], dim=1
        )
        if mixer.bias:
            yield _whole("attention.o_proj_bias", f"{prefix}o_proj.bias", (hidden,))

    def _mamba2(self, mixer: Mamba2, prefix: str) -> Iterator[Parameter]:
        hidden, shard = self.spec.hidden_dim, mixer.shard(tp=self.tp, rank=self.rank)
        inner, group = mixer.inner_dim, mixer.num_groups * mixer.state_dim
        heads = (shard.heads.start, shard.heads.stop)
        conv_ranges = _offset(
            (0, shard.inner_range), (inner, shard.group_range), (inner + group, shard.group_range)
        )
        in_ranges = [
            shard.inner_range,
            *((start + inner, stop + inner) for start, stop in conv_ranges),
            *_offset((2 * inner + 2 * group, heads)),
        ]
        in_size, conv_size = 2 * inner + 2 * group + mixer.num_heads, inner + 2 * group
        yield _sliced("mamba2.in_proj", f"{prefix}in_proj.weight", (in_size, hidden), in_ranges)
        if mixer.in_bias:
            yield _sliced("mamba2.in_proj_bias", f"{prefix}in_proj.bias", (in_size,), in_ranges)
        yield _sliced(
            "mamba2.conv",
            f"{prefix}conv1d.weight",
            (conv_size, 1, mixer.conv_width),
            conv_ranges,
            shape=(shard.conv_dim, mixer.conv_width),
        )
        if mixer.conv_bias:
            yield _sliced("mamba2.conv_bias", f"{prefix}conv1d.bias", (conv_size,), conv_ranges)
        for name in ("A_log", "D", "dt_bias"):
            yield _sliced(
                f"mamba2.{name}", prefix + name, (mixer.num_heads,), [heads], dtype=FLOAT32
            )
        if mixer.norm is not None:
            yield _sliced("mamba2.norm", f"{prefix}norm.weight", (inner,), [shard.inner_range])
        yield _sliced(
            "mamba2.out_proj",
            f"{prefix}out_proj.weight",
            (hidden, inner),
            [shard.inner_range],
            dim=1,
        )
        if mixer.out_bias:
            yield _whole("mamba2.out_proj_bias", f"{prefix}out_proj.bias", (hidden,))

    def _ffn(self, ffn: Ffn, prefix: str) -> Iterator[Parameter]:
        match ffn:
            case Mlp():
                yield from self._mlp(ffn, prefix)
            case Moe():
                yield from self._moe(ffn, prefix)
                if ffn.shared is not None:
                    yield from self._mlp(ffn.shared, prefix)

    def _mlp(self, ffn: Mlp, prefix: str) -> Iterator[Parameter]:
        names, hidden, size = self.spec.names, self.spec.hidden_dim, ffn.intermediate_dim
        rows = split_range(size, tp=self.tp, rank=self.rank)
        suffixes: list[tuple[str, tuple[int, ...]]] = [("weight", (hidden,))]
        if ffn.bias:
            suffixes.append(("bias", ()))
        for suffix, rest in suffixes:
            slices = [
                _part(prefix, part, suffix, (size, *rest), rows)
                for part in (names.mlp_gate, names.mlp_up)
            ]
            yield Parameter(
                name="mlp.in_proj" if suffix == "weight" else "mlp.in_proj_bias",
                shape=(2 * (rows[1] - rows[0]), *rest),
                slices=tuple(slices),
            )
        down = prefix + names.mlp_down
        yield _sliced("mlp.out_proj", f"{down}.weight", (hidden, size), [rows], dim=1)
        if ffn.bias:
            yield _whole("mlp.out_proj_bias", f"{down}.bias", (hidden,))

    def _moe(self, ffn: Moe, prefix: str) -> Iterator[Parameter]:
        names, hidden = self.spec.names, self.spec.hidden_dim
        experts, size = ffn.num_experts, ffn.intermediate_dim
        rows = split_range(size, tp=self.tp, rank=self.rank)
        yield _whole("moe.router", prefix + names.moe_router, (experts, hidden))
        yield _sliced(
            "moe.in_proj",
            prefix + names.moe_in,
            (experts, 2 * size, hidden),
            _offset((0, rows), (size, rows)),
            dim=1,
        )
        yield _sliced(
            "moe.out_proj", prefix + names.moe_out, (experts, hidden, size), [rows], dim=2
        )


def _offset(*sections: tuple[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges inside sections, moved to where each section starts."""
    return [(base + start, base + stop) for base, (start, stop) in sections]


def _part(
    prefix: str, part: TensorPart, suffix: str, shape: tuple[int, ...], rows: tuple[int, int]
) -> Slice:
    """Rows of one part of a fused tensor; `shape` is that of the part."""
    base = part.index * shape[0]
    return Slice(
        tensor=f"{prefix}{part.name}.{suffix}",
        stored_shape=(shape[0] * part.count, *shape[1:]),
        dim=0,
        start=base + rows[0],
        stop=base + rows[1],
    )


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> Parameter:
    return _sliced(name, tensor, shape, [(0, shape[0])])


def _sliced(
    name: str,
    tensor: str,
    stored_shape: tuple[int, ...],
    ranges: list[tuple[int, int]],
    *,
    dim: int = 0,
    shape: tuple[int, ...] | None = None,
    dtype: str = MODEL_DTYPE,
) -> Parameter:
    if shape is None:
        size = sum(stop - start for start, stop in ranges)
        shape = (*stored_shape[:dim], size, *stored_shape[dim + 1 :])
    return Parameter(
        name=name,
        shape=shape,
        slices=tuple(
            Slice(tensor=tensor, stored_shape=stored_shape, dim=dim, start=start, stop=stop)
            for start, stop in ranges
        ),
        dtype=dtype,
    )
