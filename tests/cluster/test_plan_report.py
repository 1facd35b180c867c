import json
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from plait.cluster.plan_report import (
    CAPACITY_TOKENS,
    PlanReport,
    activation_bytes,
    build_report,
    human_bytes,
    memory_budget,
    padded_sequences,
    render,
    to_json,
)
from plait.cluster.planner import (
    fit_limits,
    max_sequences,
    padded_rule_for,
    pages_in_budget,
    plan_layout,
)
from plait.worker.architectures import load_spec
from plait.worker.cost import decode_step_cost, weight_bytes
from plait.worker.dtypes import CacheDtypes
from plait.worker.errors import PlanError
from plait.worker.spec import Attention, LayerSpec, Mamba2, ModelSpec

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DTYPES = CacheDtypes(kv="bfloat16", conv="bfloat16", ssm="float32")
GIB = 1 << 30


def report_of(name, *, tp=1, device_bytes=80 * GIB, **asked):
    spec = load_spec(CONFIGS / f"{name}.json")
    layout = plan_layout(spec, tp=tp, dtypes=DTYPES)
    memory = memory_budget(spec, tp=tp, dtype="bfloat16", device_bytes=device_bytes)
    limits = fit_limits(
        layout,
        pages_in_budget(layout, memory.cache_bytes),
        model_max_len=spec.max_model_len,
        **asked,
    )
    return spec, layout, build_report(spec, layout, limits, dtype="bfloat16", memory=memory)


def test_bamba_on_one_large_device():
    spec, layout, report = report_of("bamba-9b")
    assert report.architecture == "BambaForCausalLM"
    assert report.valid_tensor_parallel_sizes == (1, 2, 4, 8, 16, 32)
    assert (report.layout_digest, report.block_size) == (layout.digest, 16)
    assert report.weight_bytes == (weight_bytes(spec, tp=1, rank=0, dtype="bfloat16"),)
    kinds = {kind.name: kind for kind in report.kinds}
    assert (kinds["state"].unit_bytes, kinds["kv"].unit_bytes) == (123_104_768, 196_608)
    assert (kinds["state"].units_per_page, kinds["kv"].units_per_page) == (1, 627)
    assert kinds["state"].lost_bytes_per_page == report.page_bytes - 123_104_768
    assert kinds["kv"].lost_bytes_per_unit == 0
    assert round(kinds["state"].lost_share, 4) == 0.0014
    assert report.padded_rule.block_size == 1040
    assert report.notes == ()


def test_memory_is_split_without_a_remainder():
    _, _, report = report_of("bamba-9b")
    memory = report.memory
    parts = memory.weight_bytes + memory.activation_bytes + memory.cache_bytes
    assert parts == int(memory.device_bytes * 0.9)
    assert memory.weight_bytes == max(report.weight_bytes)
    assert report.arena_bytes == report.num_pages * report.page_bytes
    assert 0 <= memory.cache_bytes - report.arena_bytes < report.page_bytes


def test_capacity_says_what_fits_beside_the_padded_rule():
    spec, layout, report = report_of("bamba-9b")
    assert [row.tokens for row in report.capacity] == [*CAPACITY_TOKENS, spec.max_model_len]
    for row in report.capacity:
        assert row.sequences == max_sequences(layout, report.num_pages, row.tokens)
    by_tokens = {row.tokens: row for row in report.capacity}
    # 3 attention and 29 recurrent layers: 32 layer pages a sequence, up to 1040 tokens.
    layer_pages = report.arena_bytes // (1040 * 4096)
    assert by_tokens[12].padded_sequences == layer_pages // 32
    assert by_tokens[1024].padded_sequences == layer_pages // 32
    assert by_tokens[8192].padded_sequences == layer_pages // (29 + 3 * 8)
    assert by_tokens[12].sequences > by_tokens[12].padded_sequences


def test_capacity_stops_at_the_longest_length_served():
    _, _, report = report_of("bamba-9b", max_model_len=1024)
    assert [row.tokens for row in report.capacity] == [12, 128, 1024]


def test_padded_sequences_count_windows_and_parallel_layers():
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=32, scale=1.0)
    window = Attention(num_heads=4, num_kv_heads=2, head_dim=32, scale=1.0, window=200)
    mamba = Mamba2(num_heads=8, head_dim=32, state_dim=32, num_groups=1, conv_width=4)
    spec = ModelSpec(
        architecture="Test",
        vocab_size=32,
        hidden_dim=128,
        layers=tuple(LayerSpec(mixer=mixer) for mixer in (attention, window, mamba)),
        norm_eps=1e-5,
        max_model_len=8192,
    )
    layout = plan_layout(spec, tp=1, dtypes=DTYPES)
    rule = padded_rule_for(spec, tp=1, dtypes=DTYPES)
    num_pages = 1000
    pages = num_pages * layout.page_bytes // rule.page_bytes
    assert rule.block_size == 144
    # 1440 tokens: ten blocks, three for the window of 200, one state page.
    assert padded_sequences(spec, layout, rule, num_pages, 1440) == pages // (10 + 3 + 1)
    assert padded_sequences(spec, layout, rule, num_pages, 1) == pages // 3


def test_sizes_are_those_of_the_rank_that_has_most():
    spec, _, report = report_of("falcon-h1-7b", tp=3, device_bytes=24 * GIB)
    assert len(report.weight_bytes) == 3
    assert report.memory.weight_bytes == max(report.weight_bytes)
    costs = [
        decode_step_cost(
            spec, tp=3, rank=rank, dtype="bfloat16", dtypes=DTYPES, batch=8, context=1024
        )
        for rank in range(3)
    ]
    step = next(step for step in report.decode if step.batch == 8)
    assert step.num_bytes == max(cost.bytes for cost in costs) > min(cost.bytes for cost in costs)
    assert step.flops == max(cost.flops for cost in costs)
    # Two KV heads over three ranks: the middle one holds both, the others half a block.
    kv = next(kind for kind in report.kinds if kind.name == "kv")
    assert kv.padding_bytes == kv.unit_bytes // 2


def test_decode_steps_follow_the_batches_asked_for():
    spec, layout, _ = report_of("bamba-9b")
    limits = fit_limits(layout, 100, model_max_len=1024)
    report = build_report(spec, layout, limits, dtype="bfloat16", batches=(2, 3), context=77)
    assert [(step.batch, step.context) for step in report.decode] == [(2, 77), (3, 77)]
    assert report.memory is None


def test_notes_of_the_limits_are_passed_on():
    _, _, report = report_of("mamba-codestral-7b", device_bytes=24 * GIB)
    (note,) = report.notes
    assert "max_num_seqs=256 (the default)" in note
    assert f"reduced to {report.max_num_seqs}" in note
    assert note in render(report)


def test_json_holds_every_field_and_reads_back():
    _, _, report = report_of("granite-4.0-h-small", tp=2)
    plain = json.loads(to_json(report))
    assert set(plain) == {field.name for field in fields(PlanReport)}
    assert msgspec.json.decode(to_json(report), type=PlanReport) == report


def test_text_says_what_an_operator_asks():
    _, layout, report = report_of("bamba-9b")
    text = render(report)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "1 (sizes that work: 1, 2, 4, 8, 16, 32)" in lines["tensor parallel"]
    assert "18.22 GiB" in lines["weights per rank"]
    assert "90% of 80 GiB" in lines["memory per rank"]
    assert f"{report.num_pages} pages of 117.6 MiB" in lines["arena per rank"]
    assert "262144 tokens, 256 sequences" in lines["limits"]
    assert layout.digest in lines["layout"]
    columns = {
        name: re.split(r" {2,}", lines[name])[1:] for name in ("state slot", "kv block (16)")
    }
    assert columns == {
        "state slot": ["117.4 MiB", "117.6 MiB", "1", "164.5 KiB", "164.5 KiB", "0.14%", "0 B"],
        "kv block (16)": ["192 KiB", "192 KiB", "627", "0 B", "0 B", "0.00%", "0 B"],
    }
    assert "blocks of 1040 tokens" in text
    assert "pad each state page by 0.35%" in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= 100


def test_text_of_a_model_without_attention_leaves_the_padded_rule_out():
    _, _, report = report_of("mamba-codestral-7b")
    assert report.padded_rule is None
    assert report.longest_sequence is None
    assert {row.padded_sequences for row in report.capacity} == {None}
    text = render(report)
    assert "vLLM" not in text
    assert "any: length takes no memory" in text


def test_text_gives_a_range_where_ranks_differ():
    _, _, report = report_of("falcon-h1-7b", tp=3)
    line = next(line for line in render(report).splitlines() if line.startswith("weights per"))
    low, high = human_bytes(min(report.weight_bytes)), human_bytes(max(report.weight_bytes))
    assert line.endswith(f"{low} to {high}")


def test_a_device_too_small_for_the_weights_is_refused_with_the_sizes_that_work():
    spec = load_spec(CONFIGS / "bamba-9b.json")
    with pytest.raises(PlanError, match=r"18\.22 GiB for weights .* 1, 2, 4, 8, 16, 32\)"):
        memory_budget(spec, tp=1, dtype="bfloat16", device_bytes=16 * GIB)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.01])
def test_a_utilization_that_is_no_share_is_refused(utilization):
    spec = load_spec(CONFIGS / "bamba-9b.json")
    with pytest.raises(PlanError, match=f"gpu_memory_utilization={utilization}"):
        memory_budget(spec, tp=1, dtype="bfloat16", device_bytes=80 * GIB, utilization=utilization)


def test_the_reserve_for_activations_counts_the_widest_rows_and_logits():
    spec = load_spec(CONFIGS / "bamba-9b.json")
    per_token = 2 * (4096 + 2 * 14336) * 2
    assert activation_bytes(spec, tp=1, dtype="bfloat16") == 2048 * per_token + 256 * 128_256 * 4
    assert activation_bytes(spec, tp=2, dtype="float32") == (
        2048 * 2 * (4096 + 14336) * 4 + 256 * 64_128 * 4
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (123_273_216, "117.6 MiB"),
        (1 << 40, "1 TiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(num_bytes, text):
    assert human_bytes(num_bytes) == text
