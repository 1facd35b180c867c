"""ssd_scan."""

import math

import pytest
import torch

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.ssd_scan import reference, ssd_scan

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def scan_inputs(make, lengths, *, heads=4, groups=2, dtype=F32, state_dtype=F32):
    rows = make.packed_rows(lengths)
    num_tokens, head_dim, state_dim = sum(lengths), 4, 8
    return rows | {
        "x": make.normal(num_tokens, heads, head_dim, dtype=dtype),
        "dt": make.normal(num_tokens, heads, dtype=dtype),
        "A": -make.uniform(heads, low=0.1, high=4.0),
        "B": make.normal(num_tokens, groups, state_dim, dtype=dtype),
        "C": make.normal(num_tokens, groups, state_dim, dtype=dtype),
        "state": make.state(rows, (heads, head_dim, state_dim), state_dtype),
        "D": make.normal(heads),
        "dt_bias": make.normal(heads),
    }


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        pytest.param(F32, F32, id="base"),
        pytest.param(BF16, F32, id="bf16"),
        pytest.param(F32, BF16, id="bf16 state"),
        pytest.param(BF16, BF16, id="bf16 with bf16 state"),
        pytest.param(BF16, F16, id="bf16 with fp16 state"),
        pytest.param(F64, F64, id="fp64"),
    ],
)
def test_is_as_exact_as_plain_torch(make, match, dtype, state_dtype):
    inputs = scan_inputs(make, (70, 1, 129, 0, 3), dtype=dtype, state_dtype=state_dtype)
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_any_length(make, match, length):
    match(ssd_scan, reference.ssd_scan, scan_inputs(make, (length,)), ["state"])


@pytest.mark.parametrize("chunk_size", [1, 5, 20, 64])
def test_any_chunk_size(make, match, chunk_size):
    inputs = scan_inputs(make, (19, 20, 21)) | {"chunk_size": chunk_size}
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"D": None}, id="no D"),
        pytest.param({"dt_bias": None}, id="no dt_bias"),
        pytest.param({"dt_softplus": False}, id="no softplus"),
        pytest.param({"dt_limit": (0.3, 0.9)}, id="dt_limit"),
        pytest.param({"D": None, "dt_bias": None, "dt_softplus": False}, id="none of them"),
    ],
)
def test_optional_arguments(make, match, run, options):
    inputs = scan_inputs(make, (21, 7))
    base = run(ssd_scan, inputs, ["state"])["out"]
    out = match(ssd_scan, reference.ssd_scan, inputs | options, ["state"])["out"]
    assert not torch.allclose(out, base)


def test_heads_may_touch_groups_irregularly(make, match, run):
    inputs = scan_inputs(make, (21, 7), heads=3)
    group_of_head = make.int64(0, 0, 1)
    mapped = inputs | {"group_of_head": group_of_head}
    match(ssd_scan, reference.ssd_scan, mapped, ["state"])
    one_each = {name: inputs[name][:, group_of_head] for name in ("B", "C")}
    expanded = run(ssd_scan, inputs | one_each, ["state"])
    torch.testing.assert_close(run(ssd_scan, mapped, ["state"])["out"], expanded["out"])


def test_equals_the_closed_form(make):
    inputs = scan_inputs(make, (9,), heads=2, groups=1, dtype=F64, state_dtype=F64)
    inputs |= {"dt_softplus": False, "dt_bias": None}
    x, dt, A, h = inputs["x"], inputs["dt"].clamp(min=0), inputs["A"].double(), inputs["state"][1]
    B, C = inputs["B"][:, 0], inputs["C"][:, 0]
    expected = inputs["D"].double()[:, None] * x
    for i in range(9):
        for j in range(i + 1):
            decay = torch.exp(A * dt[j + 1 : i + 1].sum(0)) * dt[j]
            expected[i] += (C[i] @ B[j]) * decay[:, None] * x[j]
        expected[i] += torch.exp(A * dt[: i + 1].sum(0))[:, None] * (h @ C[i])
    torch.testing.assert_close(ssd_scan(**inputs, chunk_size=4), expected)


@pytest.mark.parametrize("cuts", [(1,), (4,), (5,), (20,), (3, 4, 17)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_split_anywhere_equals_one_pass(make, match, cuts, dtype):
    inputs = scan_inputs(make, (21,), dtype=dtype) | {"chunk_size": 5}

    def in_pieces(*, x, dt, B, C, read_slots, write_slots, **rest):
        del rest["cu_seqlens"], rest["has_initial_state"]
        outs, source = [], read_slots
        for start, stop in zip((0, *cuts), (*cuts, 21), strict=True):
            outs.append(
                ssd_scan(
                    x[start:stop],
                    dt[start:stop],
                    B=B[start:stop],
                    C=C[start:stop],
                    cu_seqlens=make.int32(0, stop - start),
                    read_slots=source,
                    write_slots=write_slots,
                    has_initial_state=source > 0,
                    **rest,
                )
            )
            source = write_slots
        return torch.cat(outs)

    match(in_pieces, reference.ssd_scan, inputs, ["state"])


def test_strong_decay_neither_overflows_nor_loses_digits(make, match):
    inputs = scan_inputs(make, (130,)) | {"A": make.uniform(4, low=-90.0, high=-20.0)}
    inputs["dt"] = make.uniform(130, 4, low=-8.0, high=3.0)
    results = match(ssd_scan, reference.ssd_scan, inputs, ["state"])
    assert results["out"].isfinite().all()


def test_a_row_does_not_see_its_neighbours(make, run):
    inputs = scan_inputs(make, (21, 7))
    alone = {name: inputs[name][21:] for name in ("x", "dt", "B", "C")}
    alone |= {name: inputs[name][1:] for name in ("read_slots", "write_slots", "has_initial_state")}
    alone["cu_seqlens"] = make.int32(0, 7)
    both = run(ssd_scan, inputs, ["state"])
    one = run(ssd_scan, inputs | alone, ["state"])
    torch.testing.assert_close(both["out"][21:], one["out"])
    torch.testing.assert_close(both["state"][4], one["state"][4])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dt": torch.ones(5, 3)}, ShapeError, r"dt: expected shape \(T=5, H=4\), got \(5, 3\)"),
        ({"A": torch.ones(4).bfloat16()}, DtypeError, r"A: expected torch.float64 or torch.float3"),
        ({"B": torch.ones(5, 3, 8)}, ShapeError, r"C: expected shape \(T=5, G=3, N=8\), got"),
        ({"D": torch.ones(3)}, ShapeError, r"D: expected shape \(H=4\), got \(3,\)"),
        ({"dt_bias": torch.ones(3)}, ShapeError, r"dt_bias: expected shape \(H=4\), got \(3,\)"),
        ({"state": torch.ones(3, 4, 2, 9)}, ShapeError, r"state: .*N=8\), got \(3, 4, 2, 9\)"),
        ({"group_of_head": torch.ones(2).long()}, ShapeError, r"group_of_head: .*\(H=4\), got"),
        ({"chunk_size": 0}, KernelError, r"chunk_size: expected at least 1, got 0"),
        (
            {"B": torch.ones(5, 3, 8), "C": torch.ones(5, 3, 8)},
            ShapeError,
            r"B: expected G to divide H=4 when group_of_head is None, got G=3",
        ),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(5, 4, 2),
        "dt": torch.ones(5, 4),
        "A": -torch.ones(4),
        "B": torch.ones(5, 2, 8),
        "C": torch.ones(5, 2, 8),
        "state": torch.ones(3, 4, 2, 8),
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "read_slots": torch.tensor([1]),
        "write_slots": torch.tensor([1]),
        "has_initial_state": torch.tensor([False]),
        "dt_limit": (0.0, math.inf),
    }
    ssd_scan(**inputs)
    with pytest.raises(error, match=message):
        ssd_scan(**(inputs | change))
