"""The least time that a case can take on a machine: per operator the larger of its two limits.

An operator takes at least its bytes over the bandwidth and at least its floating-point operations
over the rate of their kind; the times of the operators add up. Counted is necessary work: every
weight read once per pass, recurrent state and KV of the batch, and matrix products, convolutions,
scans and attention. Left out are activations between operators, norms and activation functions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from plait.worker.spec import Attention, Mamba2, Mlp, ModelSpec
from plait_bench.cases import Case

BF16_BYTES: Final = 2
FP32_BYTES: Final = 4
# Per element of SSM state and token: decay, form dt * x * B, add, multiply by C, sum.
SCAN_FLOPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a machine was measured to do; rates are of all threads together, per second.

    `gemm_flops` is by dtype, then by rows of the activations.
    """

    read_bytes: float
    copy_bytes: float
    vector_flops: float
    gemm_flops: Mapping[str, Mapping[int, float]]

    def gemm(self, rows: int) -> float:
        """The best rate over dtypes at so many rows."""
        return max(by_rows[rows] for by_rows in self.gemm_flops.values())

    @property
    def peak_gemm(self) -> float:
        return max(max(by_rows.values()) for by_rows in self.gemm_flops.values())

    @property
    def peak_fp32(self) -> float:
        """The best rate in float32: what the multiply-add units do when well fed."""
        return max(self.vector_flops, *self.gemm_flops["float32"].values())

    def best_of(self, other: "Limits") -> "Limits":
        """The better of two measurements, figure by figure: what disturbs only slows down."""
        return Limits(
            read_bytes=max(self.read_bytes, other.read_bytes),
            copy_bytes=max(self.copy_bytes, other.copy_bytes),
            vector_flops=max(self.vector_flops, other.vector_flops),
            gemm_flops={
                dtype: {rows: max(rate, other.gemm_flops[dtype][rows]) for rows, rate in by.items()}
                for dtype, by in self.gemm_flops.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Necessary work of one operator. A matrix product has `rows` and, by weight, a `shape`.

    `read_bytes` are only read (weights, KV); `copy_bytes` are read and written, or written.
    """

    name: str
    kind: Literal["gemm", "vector"]
    flops: float
    rows: int = 0
    shape: tuple[int, int] | None = None
    read_bytes: float = 0.0
    copy_bytes: float = 0.0

    def seconds(self, limits: Limits, *, is_strict: bool) -> float:
        """The least time; strict: operations at the best rate of any size and shape."""
        memory = self.read_bytes / limits.read_bytes + self.copy_bytes / limits.copy_bytes
        if self.kind == "gemm":
            rate = limits.peak_gemm if is_strict else limits.gemm(self.rows)
        else:
            rate = limits.peak_fp32 if is_strict else limits.vector_flops
        return max(memory, self.flops / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a model: `batch` sequences get `length` tokens each, `context` came before."""

    batch: int
    length: int
    context: float = 0.0

    @classmethod
    def of_case(cls, case: Case) -> "Pass":
        """The prefill, or the mean decode step: the context grows by one token each."""
        if not case.is_decode:
            return cls(batch=case.batch, length=case.prompt_tokens)
        context = case.prompt_tokens + (case.num_steps - 1) / 2
        return cls(batch=case.batch, length=1, context=context)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def attended(self) -> float:
        """Query-key pairs of a causal attention."""
        return self.batch * self.length * (self.context + (self.length + 1) / 2)


def case_seconds(
    operators: list[Operator], case: Case, limits: Limits, *, is_strict: bool
) -> float:
    """The least time of the timed part of a case."""
    once = sum(operator.seconds(limits, is_strict=is_strict) for operator in operators)
    return once * max(1, case.num_steps)


def operators(spec: ModelSpec, step: Pass, *, weight_bytes: float = BF16_BYTES) -> list[Operator]:
    """The operators of one pass; `weight_bytes` is of one element of a matrix."""
    return list(_operators(spec, step, weight_bytes))


def weights_read(operators: list[Operator]) -> float:
    """Bytes of the matrices among the operators."""
    return sum(operator.read_bytes for operator in operators if operator.kind == "gemm")


def _operators(spec: ModelSpec, step: Pass, weight_bytes: float) -> Iterator[Operator]:
    dim = spec.hidden_dim

    def linear(name: str, rows: int, out_dim: int, in_dim: int) -> Operator:
        return Operator(
            name=name,
            kind="gemm",
            rows=rows,
            shape=(out_dim, in_dim),
            flops=2.0 * rows * out_dim * in_dim,
            read_bytes=weight_bytes * out_dim * in_dim,
        )

    tokens = step.tokens
    for index, layer in enumerate(spec.layers):
        if (attention := layer.attention) is not None:
            query_dim = attention.num_heads * attention.head_dim
            kv_dim = attention.num_kv_heads * attention.head_dim
            yield linear("qkv_proj", tokens, query_dim + 2 * kv_dim, dim)
            yield _attention(attention, step)
            yield linear("o_proj", tokens, dim, query_dim)
        if (mamba2 := layer.mamba2) is not None:
            yield linear("in_proj", tokens, sum(mamba2.shard(tp=1, rank=0).in_dims), dim)
            yield from _mamba2(mamba2, step)
            yield linear("out_proj", tokens, dim, mamba2.inner_dim)
        if layer.ffn is not None:
            if not isinstance(layer.ffn, Mlp):
                raise ValueError(f"{spec.architecture}: routed experts have no roofline here")
            # After the last mixer only the rows that give logits are needed.
            rows = step.batch if index == len(spec.layers) - 1 else tokens
            yield linear("gate_up_proj", rows, 2 * layer.ffn.intermediate_dim, dim)
            yield linear("down_proj", rows, dim, layer.ffn.intermediate_dim)
    yield linear("lm_head", step.batch, spec.vocab_size, dim)


def _attention(attention: Attention, step: Pass) -> Operator:
    """Keys and values of the context are read, those of the new tokens written."""
    token_bytes = 2 * attention.num_kv_heads * attention.head_dim * BF16_BYTES
    is_prefill = step.length > 1
    return Operator(
        name="attention",
        # Queries of a prefill meet the keys in matrix products, a single one goes row by row.
        kind="gemm" if is_prefill else "vector",
        rows=step.tokens if is_prefill else 0,
        flops=4.0 * attention.num_heads * attention.head_dim * step.attended,
        read_bytes=step.batch * step.context * token_bytes,
        copy_bytes=step.tokens * token_bytes,
    )


def _mamba2(mamba2: Mamba2, step: Pass) -> Iterator[Operator]:
    """State is read and written, or only written where a sequence starts."""
    conv_dim = mamba2.shard(tp=1, rank=0).conv_dim
    ssm = mamba2.inner_dim * mamba2.state_dim
    passes = (2 if step.context else 1) * step.batch
    yield Operator(
        name="conv",
        kind="vector",
        flops=2.0 * mamba2.conv_width * conv_dim * step.tokens,
        copy_bytes=passes * (mamba2.conv_width - 1) * conv_dim * BF16_BYTES,
    )
    yield Operator(
        name="scan",
        kind="vector",
        flops=float(SCAN_FLOPS) * ssm * step.tokens,
        copy_bytes=passes * ssm * FP32_BYTES,
    )
