"""What a model is: frozen data from which parameters, cache and cost all derive.

An adapter in `plait.worker.architectures` builds a `ModelSpec` from a config.json; one generic
decoder executes it. Nothing else computes a per-rank size: loader, layers, cache and planner read
the `shard()` of a mixer.
"""

import math
from dataclasses import dataclass, field

from plait.worker.errors import ShardError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """The heads that one rank owns, and the groups (or KV heads) that those heads read.

    Heads are split evenly and stay contiguous, hence so are the groups they touch. A group that
    heads of several ranks read is replicated on each of them.
    """

    start: int
    stop: int
    group_start: int
    group_stop: int
    group_of_head: tuple[int, ...]  # index into this rank's groups, one per local head

    @property
    def num_heads(self) -> int:
        return self.stop - self.start

    @property
    def num_groups(self) -> int:
        return self.group_stop - self.group_start

    @property
    def is_regular(self) -> bool:
        """Whether local head h reads local group h // (heads per group), as kernels assume."""
        if self.num_heads % self.num_groups:
            return False
        per_group = self.num_heads // self.num_groups
        return all(group == head // per_group for head, group in enumerate(self.group_of_head))


def shard_heads(num_heads: int, num_groups: int, *, tp: int, rank: int) -> HeadShard:
    """Split `num_heads` heads that read `num_groups` groups over `tp` ranks."""
    per_rank = num_heads // tp
    start, stop = rank * per_rank, (rank + 1) * per_rank
    groups = [head * num_groups // num_heads for head in range(start, stop)]
    return HeadShard(
        start=start,
        stop=stop,
        group_start=groups[0],
        group_stop=groups[-1] + 1,
        group_of_head=tuple(group - groups[0] for group in groups),
    )


def split_range(size: int, *, tp: int, rank: int) -> tuple[int, int]:
    """The half-open range of `size` items that `rank` owns; sizes differ by at most one."""
    return rank * size // tp, (rank + 1) * size // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding in rotate-half form over the first `rotary_dim` of a head."""

    theta: float
    rotary_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal softmax attention with grouped KV heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    bias: bool = False
    window: int | None = None
    in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    out_multiplier: float = 1.0

    def shard(self, *, tp: int, rank: int) -> HeadShard:
        return shard_heads(self.num_heads, self.num_kv_heads, tp=tp, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorm:
    """RMS norm over groups of the inner channels, before or after the gate is applied."""

    num_groups: int
    eps: float
    before_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 mixer; the fused projection and the convolution keep the sections z | x | B | C | dt.

    `norm` None means that the output is only multiplied by silu(gate).
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    chunk_size: int = 256
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    norm: GatedNorm | None = None
    in_multiplier: float = 1.0
    section_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_multiplier: float = 1.0

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    def shard(self, *, tp: int, rank: int) -> "Mamba2Shard":
        heads = shard_heads(self.num_heads, self.num_groups, tp=tp, rank=rank)
        return Mamba2Shard(mixer=self, heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shard:
    """One rank's part of a Mamba-2 mixer. Ranges are half-open and in the full sections."""

    mixer: Mamba2
    heads: HeadShard

    @property
    def inner_range(self) -> tuple[int, int]:
        """Channels of z and of x."""
        dim = self.mixer.head_dim
        return self.heads.start * dim, self.heads.stop * dim

    @property
    def group_range(self) -> tuple[int, int]:
        """Channels of B and of C."""
        dim = self.mixer.state_dim
        return self.heads.group_start * dim, self.heads.group_stop * dim

    @property
    def inner_dim(self) -> int:
        return self.heads.num_heads * self.mixer.head_dim

    @property
    def group_dim(self) -> int:
        return self.heads.num_groups * self.mixer.state_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x | B | C."""
        return self.inner_dim + 2 * self.group_dim

    @property
    def in_dims(self) -> tuple[int, int, int, int, int]:
        """Rows of the input projection by section: z, x, B, C, dt."""
        inner, group = self.inner_dim, self.group_dim
        return inner, inner, group, group, self.heads.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Attention and Mamba-2 side by side on the same input; their outputs are summed."""

    attention: Attention
    mamba2: Mamba2


Mixer = Attention | Mamba2 | Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Gated feed-forward: down(silu(gate * gate_multiplier) * up) * down_multiplier."""

    intermediate_dim: int
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts (softmax over the chosen top-k logits), plus an optional shared MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_dim: int
    shared: Mlp | None = None


Ffn = Mlp | Moe | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Part `index` of `count` equal parts, along the output dimension, of a stored tensor."""

    name: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Where a checkpoint keeps each tensor. Layer names follow `layer`, with `{i}` its index."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{i}."
    input_norm: str = "input_layernorm.weight"
    ffn_norm: str = "post_attention_layernorm.weight"
    attention: str = "self_attn."
    mamba2: str = "mamba."
    mlp_gate: TensorPart = field(default_factory=lambda: TensorPart(name="mlp.gate_proj"))
    mlp_up: TensorPart = field(default_factory=lambda: TensorPart(name="mlp.up_proj"))
    mlp_down: str = "mlp.down_proj"
    moe_router: str = "block_sparse_moe.router.layer.weight"
    moe_in: str = "block_sparse_moe.input_linear.weight"
    moe_out: str = "block_sparse_moe.output_linear.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """norm -> mixer -> residual, then norm -> ffn -> residual where there is an ffn."""

    mixer: Mixer
    ffn: Ffn = None
    residual_multiplier: float = 1.0

    @property
    def attention(self) -> Attention | None:
        """The attention of this layer, also when it stands beside a recurrent mixer."""
        match self.mixer:
            case Attention():
                return self.mixer
            case Parallel():
                return self.mixer.attention
            case _:
                return None

    @property
    def mamba2(self) -> Mamba2 | None:
        """The Mamba-2 mixer of this layer, also when it stands beside attention."""
        match self.mixer:
            case Mamba2():
                return self.mixer
            case Parallel():
                return self.mixer.mamba2
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model as data. `norm_eps` is that of the layer norms; dtypes are torch names."""

    architecture: str
    vocab_size: int
    hidden_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_model_len: int
    dtype: str = "bfloat16"
    ssm_dtype: str | None = None  # what the checkpoint's config asks for, if it says so
    tie_embeddings: bool = False
    residual_in_fp32: bool = False
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def has_recurrent_state(self) -> bool:
        return any(layer.mamba2 is not None for layer in self.layers)

    @property
    def has_attention(self) -> bool:
        return any(layer.attention is not None for layer in self.layers)

    @property
    def chunk_size(self) -> int:
        """The scan chunk of the model in tokens, 1 where nothing is scanned."""
        return max((m.chunk_size for layer in self.layers if (m := layer.mamba2)), default=1)


def valid_tp_sizes(spec: ModelSpec, *, limit: int = 64) -> tuple[int, ...]:
    """Tensor-parallel sizes up to `limit` that divide the heads of every mixer."""
    head_counts = {
        mixer.num_heads
        for layer in spec.layers
        for mixer in (layer.attention, layer.mamba2)
        if mixer is not None
    }
    common = math.gcd(*head_counts)
    return tuple(tp for tp in range(1, min(limit, common) + 1) if common % tp == 0)


def check_tp_size(spec: ModelSpec, tp: int) -> None:
    """Raise `ShardError`, naming the sizes that work, unless `tp` ranks can share `spec`."""
    valid = valid_tp_sizes(spec, limit=max(64, tp))
    if tp not in valid:
        sizes = ", ".join(map(str, valid))
        raise ShardError(
            f"tensor_parallel_size={tp} cannot split {spec.architecture}: every head count of "
            f"its mixers must be divisible by it. Sizes that work: {sizes}."
        )
