"""selective_state_update."""

from dataclasses import replace

import pytest
import torch

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.rounding import StochasticRounding
from plait.kernels.selective_state_update import reference, selective_state_update
from plait.kernels.ssd_scan import reference as scan_reference
from plait.kernels.ssd_scan import ssd_scan

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def update_inputs(
    make,
    num_rows,
    *,
    heads=4,
    groups=2,
    head_dim=5,
    state_dim=7,
    dtype=F32,
    state_dtype=F32,
):
    rows = make.decode_rows(num_rows)
    return rows | {
        "x": make.normal(num_rows, heads, head_dim, dtype=dtype),
        "dt": make.normal(num_rows, heads, dtype=dtype),
        "A": -make.uniform(heads, low=0.1, high=4.0),
        "B": make.normal(num_rows, groups, state_dim, dtype=dtype),
        "C": make.normal(num_rows, groups, state_dim, dtype=dtype),
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
@pytest.mark.parametrize("num_rows", [1, 5])
def test_is_as_exact_as_plain_torch(make, match, num_rows, dtype, state_dtype):
    inputs = update_inputs(make, num_rows, dtype=dtype, state_dtype=state_dtype)
    match(selective_state_update, reference.selective_state_update, inputs, ["state"])


@pytest.mark.parametrize(
    ("head_dim", "state_dim"), [(1, 1), (1, 16), (3, 4), (4, 8), (9, 17), (64, 128), (7, 300)]
)
def test_any_shape_of_a_head(make, match, head_dim, state_dim):
    inputs = update_inputs(make, 2, head_dim=head_dim, state_dim=state_dim, dtype=BF16)
    match(selective_state_update, reference.selective_state_update, inputs, ["state"])


@pytest.mark.parametrize("state_dim", [5, 16, 24])
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_mamba1_is_a_head_of_one_channel_with_a_rate_per_state_element(
    make, match, run, state_dim, dtype, state_dtype
):
    inputs = update_inputs(
        make,
        3,
        heads=20,
        groups=1,
        head_dim=1,
        state_dim=state_dim,
        dtype=dtype,
        state_dtype=state_dtype,
    )
    rates = inputs | {"A": -make.uniform(20, state_dim, low=0.1, high=4.0)}
    ours = match(selective_state_update, reference.selective_state_update, rates, ["state"])
    assert not torch.allclose(ours["out"], run(selective_state_update, inputs, ["state"])["out"])
    same = inputs | {"A": inputs["A"][:, None].expand(20, state_dim)}
    torch.testing.assert_close(
        run(selective_state_update, same, ["state"])["out"],
        run(selective_state_update, inputs, ["state"])["out"],
        rtol=1e-2 if dtype == BF16 else 1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_gate(make, match, run, dtype):
    inputs = update_inputs(make, 3, dtype=dtype, state_dtype=F64 if dtype == F64 else F32)
    gated = inputs | {"z": make.normal(3, 4, 5, dtype=dtype)}
    ours = match(selective_state_update, reference.selective_state_update, gated, ["state"])
    plain = run(selective_state_update, inputs, ["state"])
    assert torch.equal(ours["state"].nan_to_num(), plain["state"].nan_to_num())
    assert not torch.allclose(ours["out"], plain["out"])


def test_arguments_may_be_columns_of_wider_matrices(make, run):
    inputs = update_inputs(make, 3, dtype=BF16)
    wide = make.normal(3, 100, dtype=BF16)
    columns = {
        "x": wide[:, :20].view(3, 4, 5),
        "B": wide[:, 20:34].view(3, 2, 7),
        "C": wide[:, 34:48].view(3, 2, 7),
        "dt": wide[:, 50:54],
        "z": wide[:, 60:80].view(3, 4, 5),
    }
    copies = {name: value.contiguous() for name, value in columns.items()}
    for name, value in run(selective_state_update, inputs | columns, ["state"]).items():
        other = run(selective_state_update, inputs | copies, ["state"])[name]
        assert torch.equal(value.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("rates_by_state", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups"),
    [(130, 1, 1), (130, 1, 13), (66, 3, 2), (3, 70, 1), (2, 150, 2), (63, 1, 63)],
)
def test_blocks_of_heads(make, match, heads, head_dim, groups, rates_by_state):
    sizes = {"heads": heads, "head_dim": head_dim, "groups": groups}
    inputs = update_inputs(make, 3, dtype=BF16, state_dim=19, **sizes)
    inputs["z"] = make.normal(3, heads, head_dim, dtype=BF16)
    inputs["read_slots"][1] = 0
    if rates_by_state:
        inputs["A"] = -make.uniform(heads, 19, low=0.1, high=4.0)
    match(selective_state_update, reference.selective_state_update, inputs, ["state"])


def test_small_arguments_may_be_strided(make, run):
    inputs = update_inputs(make, 3) | {"group_of_head": make.int64(0, 1, 1, 0)}
    expected = run(selective_state_update, inputs, ["state"])
    names = ("read_slots", "write_slots", "A", "D", "dt_bias", "group_of_head")
    strided = {name: torch.stack([inputs[name]] * 3, dim=1)[:, 1] for name in names}
    assert not any(value.is_contiguous() for value in strided.values())
    results = run(selective_state_update, inputs | strided, ["state"])
    for name, value in results.items():
        assert torch.equal(value.nan_to_num(), expected[name].nan_to_num())


@pytest.mark.parametrize("name", ["x", "dt", "B", "z"])
def test_nan_comes_out(make, run, name):
    inputs = update_inputs(make, 2) | {"z": make.normal(2, 4, 5)}
    inputs[name][1].flatten()[3] = torch.nan
    assert inputs[name][1].isnan().any()
    out = run(selective_state_update, inputs, ["state"])["out"]
    assert out[0].isfinite().all()
    assert out[1].isnan().any()


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_slots_far_apart_in_memory(make, run, tmp_path, state_dtype):
    inputs = update_inputs(make, 3, state_dtype=state_dtype)
    expected = run(selective_state_update, inputs, ["state"])
    near, stride = inputs["state"], 2**30 + 24
    unit = near[0].numel()
    # A file with holes: what nobody touches takes no space.
    file = torch.from_file(
        str(tmp_path / "state"),
        shared=True,
        size=(len(near) - 1) * stride + unit,
        dtype=state_dtype,
    )
    far = file.as_strided(near.shape, (stride, *near.stride()[1:]))
    far.copy_(near)
    assert torch.equal(selective_state_update(**(inputs | {"state": far})), expected["out"])
    torch.testing.assert_close(far, expected["state"], rtol=0, atol=0, equal_nan=True)


class TestNative:
    """What only C code promises."""

    @pytest.fixture
    def backend(self, native_backend):
        return native_backend

    @pytest.mark.parametrize(("heads", "head_dim"), [(150, 1), (5, 64)])
    def test_threads_do_not_change_a_bit(self, make, run, heads, head_dim):
        sizes = {"heads": heads, "head_dim": head_dim, "groups": 1, "state_dim": 64}
        inputs = update_inputs(make, 5, dtype=BF16, **sizes)
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(run(selective_state_update, inputs, ["state"]))
        written = inputs["write_slots"]
        for other in results[1:]:
            assert torch.equal(other["out"], results[0]["out"])
            assert torch.equal(other["state"][written], results[0]["state"][written])


def test_dtypes_may_be_mixed(make, match):
    inputs = update_inputs(make, 3, dtype=BF16)
    inputs["dt"] = inputs["dt"].float()
    match(selective_state_update, reference.selective_state_update, inputs, ["state"])


class TestStochasticRounding:
    @pytest.fixture
    def rounding(self, make):
        return StochasticRounding(
            seeds=make.int64(7, -1, 1 << 40),
            positions=make.int64(0, 123, 1 << 33),
            layer=5,
            first_element=1000,
        )

    @pytest.mark.parametrize("state_dtype", [BF16, F16])
    def test_bits_are_those_of_the_reference(self, make, run, state_dtype, rounding):
        inputs = update_inputs(make, 3, state_dim=37, state_dtype=state_dtype)
        inputs["dt_softplus"] = False
        inputs["dt"] = make.uniform(3, 4, low=0.0, high=0.5)
        inputs["A"] *= 0  # no exp, whose last bit differs
        plain = run(selective_state_update, inputs, ["state"])
        ours = run(selective_state_update, inputs | {"rounding": rounding}, ["state"])
        expected = run(reference.selective_state_update, inputs | {"rounding": rounding}, ["state"])
        assert torch.equal(ours["out"], plain["out"])
        difference = (ours["state"] != expected["state"]) & ~expected["state"].isnan()
        # Inputs that are a rounding apart may fall on either side of a random threshold.
        assert difference.double().mean() < 1e-2
        assert not torch.equal(ours["state"].nan_to_num(), plain["state"].nan_to_num())

    def test_a_float32_state_is_not_touched(self, make, run, rounding):
        inputs = update_inputs(make, 3)
        plain = run(selective_state_update, inputs, ["state"])["state"]
        ours = run(selective_state_update, inputs | {"rounding": rounding}, ["state"])["state"]
        assert torch.equal(ours.nan_to_num(), plain.nan_to_num())

    def test_bits_depend_on_neither_row_nor_slot(self, make, run, rounding):
        inputs = update_inputs(make, 3, state_dtype=BF16) | {"rounding": rounding}
        order = make.int64(2, 0, 1)
        moved = inputs | {name: inputs[name][order] for name in ("x", "dt", "B", "C", "read_slots")}
        moved["rounding"] = replace(
            rounding, seeds=rounding.seeds[order], positions=rounding.positions[order]
        )
        first = run(selective_state_update, inputs, ["state"])["state"][inputs["write_slots"]]
        second = run(selective_state_update, moved, ["state"])["state"][inputs["write_slots"]]
        assert torch.equal(first[order], second)

    def test_refuses_another_number_of_rows(self, make, rounding):
        inputs = update_inputs(make, 3, state_dtype=BF16)
        inputs["rounding"] = replace(rounding, seeds=make.int64(1, 2))
        with pytest.raises(ShapeError, match=r"rounding.seeds: expected shape \(B=3\), got \(2,"):
            selective_state_update(**inputs)


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_a_row_may_update_its_slot_in_place(make, match, state_dtype):
    inputs = update_inputs(make, 5, state_dtype=state_dtype)
    inputs["write_slots"] = inputs["read_slots"]
    match(selective_state_update, reference.selective_state_update, inputs, ["state"])


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
    inputs = update_inputs(make, 5)
    base = run(selective_state_update, inputs, ["state"])["out"]
    ours = match(
        selective_state_update, reference.selective_state_update, inputs | options, ["state"]
    )
    assert not torch.allclose(ours["out"], base)


def test_heads_may_touch_groups_irregularly(make, match, run):
    inputs = update_inputs(make, 5, heads=3)
    group_of_head = make.int64(0, 0, 1)
    mapped = inputs | {"group_of_head": group_of_head}
    match(selective_state_update, reference.selective_state_update, mapped, ["state"])
    one_each = {name: inputs[name][:, group_of_head] for name in ("B", "C")}
    expanded = run(selective_state_update, inputs | one_each, ["state"])["out"]
    torch.testing.assert_close(run(selective_state_update, mapped, ["state"])["out"], expanded)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decode_equals_prefill(make, match, dtype):
    """Token by token on the slot gives what one scan over the sequence gives."""
    num_tokens = 40
    inputs = update_inputs(make, num_tokens, dtype=dtype)
    inputs["read_slots"], inputs["write_slots"] = make.int64(1), make.int64(2)

    def decode(*, x, dt, B, C, read_slots, write_slots, **rest):
        outs = []
        for t in range(num_tokens):
            token = {"x": x[t, None], "dt": dt[t, None], "B": B[t, None], "C": C[t, None]}
            slots = {"read_slots": write_slots if t else read_slots, "write_slots": write_slots}
            outs.append(selective_state_update(**token, **slots, **rest))
        return torch.cat(outs)

    whole = {
        "cu_seqlens": make.int32(0, num_tokens),
        "has_initial_state": make.int64(1) > 0,
    }
    match(decode, lambda **given: scan_reference.ssd_scan(**given, **whole), inputs, ["state"])
    match(
        lambda **given: ssd_scan(**given, **whole),
        lambda **given: scan_reference.ssd_scan(**given, **whole),
        inputs,
        ["state"],
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dt": torch.ones(3, 4)}, ShapeError, r"dt: expected shape \(B=2, H=4\), got \(3, 4\)"),
        ({"A": torch.ones(4).half()}, DtypeError, r"A: expected torch.float64 or torch.float32,"),
        ({"C": torch.ones(2, 2, 9)}, ShapeError, r"C: expected shape \(B=2, G=2, N=8\), got"),
        ({"D": torch.ones(3)}, ShapeError, r"D: expected shape \(H=4\), got \(3,\)"),
        ({"dt_bias": torch.ones(3)}, ShapeError, r"dt_bias: expected shape \(H=4\), got \(3,\)"),
        ({"state": torch.ones(3, 4, 8, 2).mT}, ShapeError, r"state: expected contiguous dims"),
        ({"write_slots": torch.ones(2)}, DtypeError, r"write_slots: expected torch.int64, got"),
        ({"group_of_head": torch.ones(4)}, DtypeError, r"group_of_head: expected torch.int64"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(2, 4, 2),
        "dt": torch.ones(2, 4),
        "A": -torch.ones(4),
        "B": torch.ones(2, 2, 8),
        "C": torch.ones(2, 2, 8),
        "state": torch.ones(3, 4, 2, 8),
        "read_slots": torch.tensor([1, 2]),
        "write_slots": torch.tensor([1, 2]),
    }
    selective_state_update(**inputs)
    with pytest.raises(error, match=message):
        selective_state_update(**(inputs | change))
