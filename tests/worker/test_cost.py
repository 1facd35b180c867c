from dataclasses import replace
from pathlib import Path

import pytest

from plait.worker.architectures import load_spec
from plait.worker.cost import decode_step_cost, expert_share, weight_bytes
from plait.worker.dtypes import CacheDtypes
from plait.worker.spec import Attention, LayerSpec, Mamba2, Mlp, ModelSpec, Moe

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DTYPES = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")
HIDDEN, VOCAB = 8, 32


def model(*layers, tied=False):
    return ModelSpec(
        architecture="Test",
        vocab_size=VOCAB,
        hidden_dim=HIDDEN,
        layers=layers,
        norm_eps=1e-5,
        max_model_len=1024,
        tie_embeddings=tied,
    )


def cost(spec, batch=1, context=0, tp=1, rank=0, quantization=None):
    return decode_step_cost(
        spec,
        quantization=quantization,
        tp=tp,
        rank=rank,
        dtype="bfloat16",
        dtypes=DTYPES,
        batch=batch,
        context=context,
    )


ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
MAMBA = Mamba2(num_heads=4, head_dim=8, state_dim=16, num_groups=2, conv_width=4)


def test_weight_bytes_count_float32_parameters_as_four():
    spec = load_spec(CONFIGS / "bamba-9b.json")
    kept = 29 * 3 * 128  # A_log, D and dt_bias of each recurrent layer
    total = weight_bytes(spec, tp=1, rank=0, dtype="bfloat16")
    assert total == 2 * 9_780_235_392 + 2 * kept
    assert weight_bytes(spec, tp=1, rank=0, dtype="float32") == 4 * 9_780_235_392


def test_weight_bytes_of_ranks_add_up_to_the_model_plus_what_is_replicated():
    spec = load_spec(CONFIGS / "mamba-codestral-7b.json")
    whole = weight_bytes(spec, tp=1, rank=0, dtype="bfloat16")
    ranks = [weight_bytes(spec, tp=8, rank=rank, dtype="bfloat16") for rank in range(8)]
    norms = (64 + 1) * 4096 * 2  # the layer norms are on every rank, everything else is split
    assert sum(ranks) == whole + 7 * norms


def test_int8_weights_count_one_byte_and_a_scale_per_output():
    spec = model(LayerSpec(mixer=MAMBA))
    rows = (2 * 32 + 2 * 32 + 4) + HIDDEN + VOCAB  # in_proj, out_proj, head
    elements = (2 * 32 + 2 * 32 + 4) * HIDDEN + HIDDEN * 32 + VOCAB * HIDDEN
    plain = weight_bytes(spec, tp=1, rank=0, dtype="bfloat16")
    quantized = weight_bytes(spec, tp=1, rank=0, dtype="bfloat16", quantization="int8")
    assert plain - quantized == elements - 4 * rows
    assert cost(spec).bytes - cost(spec, quantization="int8").bytes == elements - 4 * rows


def test_a_tied_embedding_has_an_int8_head_beside_it():
    plain = weight_bytes(model(tied=True), tp=1, rank=0, dtype="bfloat16")
    quantized = weight_bytes(model(tied=True), tp=1, rank=0, dtype="bfloat16", quantization="int8")
    assert quantized - plain == VOCAB * HIDDEN + 4 * VOCAB
    step = cost(model(tied=True)), cost(model(tied=True), quantization="int8")
    assert step[0].bytes - step[1].bytes == VOCAB * HIDDEN - 4 * VOCAB


def test_embeddings_and_head_alone_cost_the_rows_read():
    final_norm = HIDDEN * 2
    untied = cost(model(), batch=4)
    assert untied.bytes == VOCAB * HIDDEN * 2 * (1 + 4 / VOCAB) + final_norm
    tied = cost(model(tied=True), batch=4)
    assert tied.bytes == VOCAB * HIDDEN * 2 + final_norm
    assert untied.flops == tied.flops == 2 * 4 * (VOCAB * HIDDEN + HIDDEN)


def test_attention_costs_grow_with_context_and_stop_at_the_window():
    per_token = 2 * 2 * 16 * 2  # k and v, KV heads, head dim, bytes
    full = model(LayerSpec(mixer=ATTENTION))
    short, long = cost(full, batch=3, context=10), cost(full, batch=3, context=110)
    assert long.bytes - short.bytes == 3 * 100 * per_token
    assert long.flops - short.flops == 3 * 100 * 4 * 4 * 16
    windowed = model(LayerSpec(mixer=replace(ATTENTION, window=64)))
    assert cost(windowed, context=1000) == cost(windowed, context=63)
    assert cost(windowed, context=63) != cost(windowed, context=62)


def test_recurrent_state_is_read_and_written_whatever_the_context():
    spec = model(LayerSpec(mixer=MAMBA))
    one, two = cost(spec, batch=1), cost(spec, batch=2)
    conv, ssm = 3 * (32 + 2 * 32), 4 * 8 * 16
    embedding_row = HIDDEN * 2
    assert two.bytes - one.bytes == 2 * (conv * 2 + ssm * 4) + embedding_row
    assert cost(spec, context=999) == cost(spec, context=1)
    weights = sum((2 * 32 + 2 * 32 + 4, 32))  # in_proj rows, out_proj columns
    others = 96 * 4 + 96 + 3 * 4 + HIDDEN  # conv with bias, A_log, D and dt_bias, input norm
    head = VOCAB * HIDDEN + HIDDEN
    assert one.flops == 2 * (weights * HIDDEN + others + head) + 5 * ssm


def test_only_the_experts_that_are_hit_are_read():
    moe = Moe(num_experts=8, experts_per_token=2, intermediate_dim=16)
    spec = model(LayerSpec(mixer=ATTENTION, ffn=moe))
    dense = model(LayerSpec(mixer=ATTENTION, ffn=replace(moe, experts_per_token=8)))
    experts = 8 * 3 * 16 * HIDDEN
    assert cost(dense).bytes - cost(spec).bytes == pytest.approx(0.75 * experts * 2)
    assert cost(dense).flops - cost(spec).flops == pytest.approx(0.75 * experts * 2)
    assert expert_share(moe, 1) == 0.25
    assert expert_share(moe, 2) == pytest.approx(0.4375)
    assert expert_share(moe, 200) == pytest.approx(1.0)


def test_ranks_share_the_work():
    spec = model(LayerSpec(mixer=MAMBA, ffn=Mlp(intermediate_dim=64)), LayerSpec(mixer=ATTENTION))
    whole = cost(spec, batch=2, context=50)
    half = cost(spec, batch=2, context=50, tp=2, rank=1)
    assert whole.flops / 2 < half.flops < whole.flops * 0.51
    assert whole.bytes / 2 < half.bytes < whole.bytes * 0.51
