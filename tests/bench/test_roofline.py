"""Roofline numbers, worked out by hand for a tiny model."""

import pytest
from plait_bench.cases import Case
from plait_bench.roofline import (
    Limits,
    Operator,
    Pass,
    case_seconds,
    operators,
    weights_read,
)

from plait.worker.spec import Attention, LayerSpec, Mamba2, Mlp, ModelSpec, Moe

MLP = Mlp(intermediate_dim=6)
SPEC = ModelSpec(
    architecture="Tiny",
    vocab_size=10,
    hidden_dim=4,
    norm_eps=1e-5,
    max_model_len=64,
    layers=(
        LayerSpec(
            mixer=Mamba2(num_heads=2, head_dim=4, state_dim=3, num_groups=1, conv_width=4), ffn=MLP
        ),
        LayerSpec(mixer=Attention(num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0), ffn=MLP),
    ),
)
DECODE = Case(name="d", batch=3, prompt_tokens=5, num_steps=4)
PREFILL = Case(name="p", batch=2, prompt_tokens=7)
LIMITS = Limits(
    read_bytes=10.0,
    copy_bytes=5.0,
    vector_flops=2.0,
    gemm_flops={"float32": {1: 8.0, 2: 16.0}, "bfloat16": {1: 9.0, 2: 12.0}},
)


def by_name(case: Case) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = {}
    for op in operators(SPEC, Pass.of_case(case)):
        found.setdefault(op.name, []).append(op)
    return found


def test_a_model_has_its_operators_in_order():
    names = [op.name for op in operators(SPEC, Pass.of_case(DECODE))]
    mlp = ["gate_up_proj", "down_proj"]
    mamba2 = ["in_proj", "conv", "scan", "out_proj"]
    assert names == [*mamba2, *mlp, "qkv_proj", "attention", "o_proj", *mlp, "lm_head"]


def test_products_of_a_decode_step():
    found = by_name(DECODE)
    (in_proj,) = found["in_proj"]  # z 8, x 8, B 3, C 3, dt 2 outputs
    assert in_proj.shape == (24, 4)
    assert (in_proj.rows, in_proj.flops, in_proj.read_bytes) == (3, 2 * 3 * 24 * 4, 2 * 24 * 4)
    (qkv,) = found["qkv_proj"]
    assert qkv.shape == (8, 4)
    assert [op.shape for op in found["gate_up_proj"]] == [(12, 4)] * 2
    (head,) = found["lm_head"]
    assert (head.rows, head.read_bytes) == (3, 80)


def test_state_of_a_decode_step_is_read_and_written():
    found = by_name(DECODE)
    (conv,), (scan,) = found["conv"], found["scan"]
    assert conv.flops == 2 * 4 * 14 * 3  # width, channels, tokens
    assert conv.copy_bytes == 3 * 2 * (3 * 14 * 2)  # sequences, directions, bytes
    assert scan.flops == 5 * (8 * 3) * 3
    assert scan.copy_bytes == 3 * 2 * (8 * 3 * 4)


def test_attention_of_the_mean_decode_step():
    # 5, 6, 7 and 8 tokens came before: 6.5 on average, and the token attends to itself.
    (attention,) = by_name(DECODE)["attention"]
    assert attention.flops == 4 * 2 * 2 * 3 * 7.5
    assert attention.read_bytes == 3 * 6.5 * (2 * 1 * 2 * 2)
    assert attention.kind == "vector"


def test_a_prefill_only_writes_state_and_skips_what_no_logit_needs():
    found = by_name(PREFILL)
    assert found["scan"][0].copy_bytes == 2 * (8 * 3 * 4)
    assert found["attention"][0].flops == 4 * 2 * 2 * 2 * 28  # 1 + 2 + ... + 7 pairs each
    assert [op.rows for op in found["down_proj"]] == [14, 2]
    assert found["lm_head"][0].rows == 2


def test_narrower_weights_are_fewer_bytes():
    step = Pass.of_case(DECODE)
    wide, narrow = operators(SPEC, step), operators(SPEC, step, weight_bytes=1)
    assert weights_read(wide) == 2 * weights_read(narrow)
    # in, out, twice the mlp, qkv, o, head
    assert weights_read(narrow) == 24 * 4 + 4 * 8 + 2 * (12 * 4 + 4 * 6) + 8 * 4 + 4 * 4 + 10 * 4


def test_an_operator_takes_the_larger_of_its_limits():
    memory = Operator(name="m", kind="gemm", rows=1, flops=9, read_bytes=20, copy_bytes=10)
    assert memory.seconds(LIMITS, is_strict=False) == 20 / 10 + 10 / 5
    product = Operator(name="g", kind="gemm", rows=1, flops=90, read_bytes=20)
    assert product.seconds(LIMITS, is_strict=False) == 90 / 9  # bfloat16 is faster at one row
    assert product.seconds(LIMITS, is_strict=True) == 90 / 16
    vector = Operator(name="v", kind="vector", flops=32)
    assert vector.seconds(LIMITS, is_strict=False) == 32 / 2
    assert vector.seconds(LIMITS, is_strict=True) == 32 / 16


def test_times_of_operators_and_steps_add_up():
    ops = [Operator(name="a", kind="vector", flops=4), Operator(name="b", kind="vector", flops=6)]
    assert case_seconds(ops, PREFILL, LIMITS, is_strict=False) == 5
    assert case_seconds(ops, DECODE, LIMITS, is_strict=False) == 4 * 5


def test_the_better_of_two_measurements():
    other = Limits(
        read_bytes=11.0,
        copy_bytes=4.0,
        vector_flops=3.0,
        gemm_flops={"float32": {1: 7.0, 2: 17.0}, "bfloat16": {1: 10.0, 2: 11.0}},
    )
    assert LIMITS.best_of(other) == Limits(
        read_bytes=11.0,
        copy_bytes=5.0,
        vector_flops=3.0,
        gemm_flops={"float32": {1: 8.0, 2: 17.0}, "bfloat16": {1: 10.0, 2: 12.0}},
    )


def test_experts_are_refused():
    moe = Moe(num_experts=4, experts_per_token=2, intermediate_dim=6)
    layer = LayerSpec(mixer=SPEC.layers[1].mixer, ffn=moe)
    spec = ModelSpec(
        architecture="Tiny",
        vocab_size=10,
        hidden_dim=4,
        norm_eps=1e-5,
        max_model_len=64,
        layers=(layer,),
    )
    with pytest.raises(ValueError, match="experts have no roofline"):
        operators(spec, Pass.of_case(DECODE))
