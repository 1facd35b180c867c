"""rms_norm_gated and grouped_sum_squares."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.rms_norm_gated import grouped_sum_squares, reference, rms_norm_gated

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CHANNELS = 12


def norm_inputs(make, *, num_tokens=7, dtype=F32, weight_dtype=None):
    return {
        "x": make.normal(num_tokens, CHANNELS, dtype=dtype),
        "gate": make.normal(num_tokens, CHANNELS, dtype=dtype),
        "weight": make.normal(CHANNELS, dtype=weight_dtype or dtype),
        "eps": 1e-5,
        "group_width": CHANNELS,
    }


def groups(make):
    """Three uneven groups, as a rank sees them that starts and ends inside a group."""
    return {
        "group_of_channel": make.int64(0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2),
        "num_groups": 3,
        "group_width": 8,
    }


def sum_inputs(inputs):
    names = ("x", "gate", "norm_before_gate", "group_of_channel", "num_groups")
    return {name: inputs[name] for name in names}


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_is_as_exact_as_plain_torch(make, match, norm_before_gate, has_gate, is_grouped, dtype):
    inputs = norm_inputs(make, dtype=dtype) | {
        "norm_before_gate": norm_before_gate,
        "group_of_channel": None,
        "num_groups": 1,
    }
    inputs |= groups(make) if is_grouped else {}
    inputs |= {} if has_gate else {"gate": None}
    match(rms_norm_gated, reference.rms_norm_gated, inputs)
    match(grouped_sum_squares, reference.grouped_sum_squares, sum_inputs(inputs))


def test_one_token_and_a_wider_weight(make, match):
    inputs = norm_inputs(make, num_tokens=1, dtype=BF16, weight_dtype=F32)
    assert match(rms_norm_gated, reference.rms_norm_gated, inputs)["out"].dtype == BF16


@pytest.mark.parametrize("num_groups", [1, 3])
def test_equals_mamba2(make, num_groups):
    width = CHANNELS // num_groups
    group_of_channel = torch.arange(CHANNELS, device=make.device) // width
    inputs = norm_inputs(make) | {"group_width": width, "num_groups": num_groups}
    inputs["group_of_channel"] = group_of_channel
    norm = MambaRMSNormGated(CHANNELS, width, eps=1e-5).to(make.device)
    norm.weight.data = inputs["weight"]
    torch.testing.assert_close(rms_norm_gated(**inputs), norm(inputs["x"], inputs["gate"]))


def test_norm_before_gate_gates_the_normalised_value(make):
    inputs = norm_inputs(make)
    gate = inputs.pop("gate")
    expected = rms_norm_gated(gate=None, **inputs) * F.silu(gate)
    out = rms_norm_gated(gate=gate, norm_before_gate=True, **inputs)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_sums_over_ranks_equal_one_rank(make, norm_before_gate):
    """Two ranks split 12 channels of 2 groups after the fifth one: rank 1 touches both groups."""
    inputs = norm_inputs(make, dtype=F64) | {"norm_before_gate": norm_before_gate}
    inputs |= {"group_of_channel": make.int64(*[0] * 6, *[1] * 6), "num_groups": 2}
    inputs["group_width"] = 6
    expected = rms_norm_gated(**inputs)
    by_channel = {"x", "gate", "weight", "group_of_channel"}
    ranks = [
        {name: value[..., part] if name in by_channel else value for name, value in inputs.items()}
        for part in (slice(0, 5), slice(5, 12))
    ]
    total = sum(grouped_sum_squares(**sum_inputs(rank)) for rank in ranks)
    outs = [rms_norm_gated(**rank, sum_squares=total) for rank in ranks]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected)


@pytest.mark.parametrize("module", [reference, None])
def test_without_a_map_all_channels_are_in_group_0(make, module):
    op = module.grouped_sum_squares if module else grouped_sum_squares
    x = make.normal(3, CHANNELS)
    sums = op(x, None, norm_before_gate=False, group_of_channel=None, num_groups=2)
    assert sums.dtype == F32
    torch.testing.assert_close(sums[:, 0], x.square().sum(dim=1))
    assert (sums[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate": torch.ones(7, 3)}, ShapeError, r"gate: expected .*C=12\), got \(7, 3\)"),
        ({"weight": torch.ones(3)}, ShapeError, r"weight: expected shape \(C=12\), got \(3,\)"),
        ({"group_of_channel": torch.ones(12)}, DtypeError, r"group_of_channel: .*torch.int64, got"),
        ({"num_groups": 0}, KernelError, r"num_groups: expected at least 1, got 0"),
        ({"group_width": 0}, KernelError, r"group_width: expected at least 1, got 0"),
        ({"sum_squares": torch.ones(7, 2)}, ShapeError, r"sum_squares: .*num_groups=1\), got"),
        ({"sum_squares": torch.ones(7, 1).half()}, DtypeError, r"sum_squares: .*torch.float32, g"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(7, CHANNELS),
        "gate": torch.ones(7, CHANNELS),
        "weight": torch.ones(CHANNELS),
        "eps": 1e-5,
        "group_width": CHANNELS,
    }
    rms_norm_gated(**inputs)
    with pytest.raises(error, match=message):
        rms_norm_gated(**(inputs | change))


def test_grouped_sum_squares_refuses_bad_arguments(make):
    with pytest.raises(KernelError, match="num_groups: expected at least 1, got -1"):
        grouped_sum_squares(
            make.normal(2, 3), None, norm_before_gate=True, group_of_channel=None, num_groups=-1
        )
