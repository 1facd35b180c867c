"""What a model costs by its spec: bytes of weights, and bytes and operations of a decode step.

These are counts of necessary work, not measurements: activations between operators, which stay in
caches, and the few operations of norms and activation functions are left out.
"""

from dataclasses import dataclass, replace

from plait.worker.dtypes import DTYPE_BYTES, CacheDtypes
from plait.worker.parameters import FLOAT32, Parameter, rank_parameters
from plait.worker.spec import Attention, Mamba2, ModelSpec, Moe

# Per element of SSM state: decay it, form dt * x * B, add it, multiply by C and sum.
_SSM_OPERATIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Memory traffic in bytes and floating-point operations, of one rank."""

    bytes: float
    flops: float


def weight_bytes(
    spec: ModelSpec, *, tp: int, rank: int, dtype: str, quantization: str | None = None
) -> int:
    """Bytes of the weights that `rank` holds in `dtype`; parameters kept in float32 count so.

    A tied embedding is counted once, though a rank that packs its weights holds a second form of it
    for the head; quantized it is counted twice, for the two differ then.
    """
    parameters = rank_parameters(spec, tp=tp, rank=rank)
    total = sum(_bytes(parameter, dtype, quantization) for parameter in parameters)
    if quantization is not None and spec.tie_embeddings:
        total += _bytes(replace(parameters[0], name="head"), dtype, quantization)
    return total


def decode_step_cost(
    spec: ModelSpec,
    *,
    tp: int,
    rank: int = 0,
    dtype: str,
    dtypes: CacheDtypes,
    batch: int,
    context: int,
    quantization: str | None = None,
) -> Cost:
    """Cost on `rank` of one new token for each of `batch` sequences with `context` tokens before.

    Bytes: every weight once - of routed experts the share that is expected to be hit, of an untied
    embedding the rows looked up; per sequence the recurrent state read and written, the keys and
    values of the context (at most the window) read, those of the new token written.

    Operations: two per weight and token that meet (routed experts: the chosen ones; an embedding
    only where it is the head as well); 4 * heads * head_dim per token attended to; 5 per element of
    SSM state.
    """
    moved, flops = 0.0, 0.0
    for parameter in rank_parameters(spec, tp=tp, rank=rank):
        read, used = _shares(spec, parameter, batch)
        if quantization is not None and parameter.name == "embedding" and spec.tie_embeddings:
            parameter = replace(parameter, name="head")  # what is read of it is the head
        moved += read * _bytes(parameter, dtype, quantization)
        flops += 2.0 * batch * used * parameter.numel
    for layer in spec.layers:
        for cost in (
            _attention(layer.attention, tp=tp, rank=rank, dtypes=dtypes, context=context),
            _mamba2(layer.mamba2, tp=tp, rank=rank, dtypes=dtypes),
        ):
            moved += batch * cost.bytes
            flops += batch * cost.flops
    return Cost(bytes=moved, flops=flops)


def expert_share(moe: Moe, tokens: int) -> float:
    """Expected share of the experts hit by `tokens` tokens, each choosing evenly: 1-(1-k/E)^T."""
    return 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** tokens


def _shares(spec: ModelSpec, parameter: Parameter, batch: int) -> tuple[float, float]:
    """Share of a parameter that a step reads, and share that meets each token."""
    match parameter.name.split("."):
        case ["embedding"] if not spec.tie_embeddings:
            return min(1.0, batch / spec.vocab_size), 0.0
        case ["layers", index, "moe", "in_proj" | "out_proj"]:
            moe = spec.layers[int(index)].ffn
            assert isinstance(moe, Moe), "only routed layers have experts"
            return expert_share(moe, batch), moe.experts_per_token / moe.num_experts
        case _:
            return 1.0, 1.0


def _attention(
    mixer: Attention | None, *, tp: int, rank: int, dtypes: CacheDtypes, context: int
) -> Cost:
    """Keys and values of one sequence: the new token attends to itself and to what came before."""
    if mixer is None:
        return Cost(bytes=0, flops=0)
    shard = mixer.shard(tp=tp, rank=rank)
    attended = context + 1 if mixer.window is None else min(context + 1, mixer.window)
    token_bytes = 2 * shard.num_groups * mixer.head_dim * DTYPE_BYTES[dtypes.kv]
    return Cost(
        bytes=attended * token_bytes,  # attended - 1 tokens read, one written
        flops=4 * shard.num_heads * mixer.head_dim * attended,
    )


def _mamba2(mixer: Mamba2 | None, *, tp: int, rank: int, dtypes: CacheDtypes) -> Cost:
    """Recurrent state of one sequence, read and written."""
    if mixer is None:
        return Cost(bytes=0, flops=0)
    shard = mixer.shard(tp=tp, rank=rank)
    conv = (mixer.conv_width - 1) * shard.conv_dim
    ssm = shard.inner_dim * mixer.state_dim
    state_bytes = conv * DTYPE_BYTES[dtypes.conv] + ssm * DTYPE_BYTES[dtypes.ssm]
    return Cost(bytes=2 * state_bytes, flops=_SSM_OPERATIONS * ssm)


def _bytes(parameter: Parameter, dtype: str, quantization: str | None) -> int:
    if quantization is not None and parameter.is_quantizable:
        rows = parameter.numel // parameter.shape[-1]
        return parameter.numel + DTYPE_BYTES[FLOAT32] * rows
    return parameter.numel * DTYPE_BYTES[FLOAT32 if parameter.dtype == FLOAT32 else dtype]
