"""rms_norm_gated and grouped_sum_squares."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.rms_norm_gated import grouped_sum_squares, reference, rms_norm_gated

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CHANNELS = 12


def norm_inputs(make, *, num_tokens=7, channels=CHANNELS, dtype=F32, weight_dtype=None):
    return {
        "x": make.normal(num_tokens, channels, dtype=dtype),
        "gate": make.normal(num_tokens, channels, dtype=dtype),
        "weight": make.normal(channels, dtype=weight_dtype or dtype),
        "eps": 1e-5,
        "group_width": channels,
    }


def groups(make):
    """Three uneven groups, as a rank sees them that starts and ends inside a group."""
    return {
        "group_of_channel": make.int64(0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2),
        "num_groups": 3,
        "group_width": 8,
    }


def regular_groups(make, num_groups, width):
    """Equal runs of channels, one for each group."""
    channels = torch.arange(num_groups * width, device=make.device)
    return {
        "group_of_channel": channels // width,
        "num_groups": num_groups,
        "group_width": width,
    }


def sum_inputs(inputs):
    defaults = {"norm_before_gate": False, "group_of_channel": None, "num_groups": 1}
    names = ("x", "gate", *defaults)
    return {name: (defaults | inputs)[name] for name in names}


def match_both(match, inputs):
    match(rms_norm_gated, reference.rms_norm_gated, inputs)
    match(grouped_sum_squares, reference.grouped_sum_squares, sum_inputs(inputs))


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
    match_both(match, inputs)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "gate_dtype"),
    [
        pytest.param(BF16, F32, BF16, id="bf16 with fp32 weight"),
        pytest.param(F16, F32, F16, id="fp16 with fp32 weight"),
        pytest.param(F32, BF16, F32, id="fp32 with bf16 weight"),
        pytest.param(BF16, BF16, F32, id="bf16 with fp32 gate"),
        pytest.param(F32, F32, F64, id="fp32 with fp64 gate"),
    ],
)
def test_one_token_of_mixed_dtypes(make, match, dtype, weight_dtype, gate_dtype):
    inputs = norm_inputs(make, num_tokens=1, dtype=dtype, weight_dtype=weight_dtype)
    inputs["gate"] = inputs["gate"].to(gate_dtype)
    assert match(rms_norm_gated, reference.rms_norm_gated, inputs)["out"].dtype == dtype
    match(grouped_sum_squares, reference.grouped_sum_squares, sum_inputs(inputs))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("channels", [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 300])
def test_any_number_of_channels(make, match, channels, dtype):
    match_both(match, norm_inputs(make, num_tokens=3, channels=channels, dtype=dtype))


def test_no_tokens_and_no_channels(make):
    assert rms_norm_gated(**norm_inputs(make, num_tokens=0)).shape == (0, CHANNELS)
    inputs = norm_inputs(make, channels=0) | {"group_width": 1}
    assert rms_norm_gated(**inputs).shape == (7, 0)
    assert (grouped_sum_squares(**sum_inputs(inputs)) == 0).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("num_groups", "width"), [(1, 37), (3, 1), (8, 16), (5, 67), (2, 128)])
def test_regular_groups(make, match, num_groups, width, dtype):
    inputs = norm_inputs(make, channels=num_groups * width, dtype=dtype)
    match_both(match, inputs | regular_groups(make, num_groups, width))


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_groups_in_any_order(make, match, norm_before_gate):
    """Groups of several runs, runs of one channel, a group of nobody."""
    channels = 150
    order = torch.randperm(channels, generator=torch.Generator().manual_seed(0)).to(make.device)
    maps = [order % 5, torch.where(order < 75, 4, 2), torch.arange(channels) // 40 % 2]
    inputs = norm_inputs(make, channels=channels) | {"norm_before_gate": norm_before_gate}
    for group_of_channel in maps:
        groups = {"group_of_channel": group_of_channel, "num_groups": 6, "group_width": 30}
        match_both(match, inputs | groups)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_many_tokens_on_several_threads(make, match, dtype):
    inputs = norm_inputs(make, num_tokens=61, channels=402, dtype=dtype)
    match_both(match, inputs)
    match_both(match, inputs | regular_groups(make, 6, 67))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_arguments_may_have_gaps(make, match, dtype):
    inputs = norm_inputs(make, dtype=dtype) | groups(make)
    inputs["x"] = make.normal(7, 50, dtype=dtype)[:, 30:42]
    inputs["gate"] = make.normal(7, 40, dtype=dtype)[:, 2:14]
    match_both(match, inputs)
    inputs["x"] = make.normal(12, 7, dtype=dtype).t()
    inputs["gate"] = make.normal(12, 7, dtype=dtype).t()
    inputs["weight"] = make.normal(12, 2, dtype=dtype)[:, 1]
    inputs["group_of_channel"] = torch.stack([inputs["group_of_channel"]] * 2, dim=1)[:, 0]
    inputs["sum_squares"] = make.uniform(3, 7, low=0.5, high=2.0).t()
    match_both(match, inputs)


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums_of_all_ranks_may_be_given(make, match, norm_before_gate, has_gate, dtype):
    inputs = norm_inputs(make, dtype=dtype) | groups(make) | {"norm_before_gate": norm_before_gate}
    inputs["sum_squares"] = make.uniform(7, 3, low=0.5, high=20.0)
    inputs |= {} if has_gate else {"gate": None}
    match(rms_norm_gated, reference.rms_norm_gated, inputs)


@pytest.mark.parametrize("name", ["x", "gate"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_token_only(make, name, bad):
    inputs = norm_inputs(make) | groups(make)
    expected = rms_norm_gated(**inputs)
    inputs[name][3, 4] = bad
    out = rms_norm_gated(**inputs)
    assert out[3, 4].isnan()
    assert torch.equal(out[:3], expected[:3])
    assert torch.equal(out[4:], expected[4:])


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
@pytest.mark.parametrize("dtype", [F32, F64])
def test_sums_over_ranks_equal_one_rank(make, norm_before_gate, dtype):
    """Two ranks split 12 channels of 2 groups after the fifth one: rank 1 touches both groups."""
    inputs = norm_inputs(make, dtype=dtype) | {"norm_before_gate": norm_before_gate}
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


def test_a_group_that_is_not_there_is_refused(make, backend):
    inputs = norm_inputs(make) | {"group_of_channel": make.int64(*[0] * 11, 3), "num_groups": 3}
    with pytest.raises((KernelError, IndexError), match=r"group_of_channel: exp|out of bounds"):
        rms_norm_gated(**inputs)
    inputs["group_of_channel"] = -inputs["group_of_channel"]
    if backend == "native":
        with pytest.raises(KernelError, match="group_of_channel: expected groups from 0 to 2 only"):
            grouped_sum_squares(**sum_inputs(inputs))
