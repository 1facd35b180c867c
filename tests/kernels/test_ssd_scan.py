"""ssd_scan."""

import math

import pytest
import torch

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.rounding import StochasticRounding, round_stochastically
from plait.kernels.ssd_scan import reference, ssd_scan

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# The chunk of the C code has 32 tokens, and it steps through up to 4 tokens one by one.
LENGTHS = [1, 4, 5, 15, 16, 17, 31, 32, 33, 36, 37, 63, 64, 65, 300]


def scan_inputs(
    make, lengths, *, heads=4, groups=2, head_dim=4, state_dim=8, dtype=F32, state_dtype=F32
):
    rows = make.packed_rows(lengths)
    num_tokens = sum(lengths)
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
        pytest.param(F16, F32, id="fp16"),
        pytest.param(F16, F16, id="fp16 with fp16 state"),
        pytest.param(F32, F64, id="fp64 state"),
        pytest.param(F64, F64, id="fp64"),
    ],
)
def test_is_as_exact_as_plain_torch(make, match, dtype, state_dtype):
    inputs = scan_inputs(make, (70, 1, 129, 0, 3), dtype=dtype, state_dtype=state_dtype)
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length(make, match, length):
    # The first row starts from a state, the second one from zeros.
    match(ssd_scan, reference.ssd_scan, scan_inputs(make, (length, length)), ["state"])


# One, below, at and above a vector, a tile of rows and a tile of columns of any instruction set.
@pytest.mark.parametrize(
    ("head_dim", "state_dim"),
    [(1, 1), (3, 5), (5, 3), (6, 16), (7, 17), (8, 64), (15, 33), (17, 65), (64, 128), (80, 16)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_dims(make, match, head_dim, state_dim, dtype):
    sizes = {"head_dim": head_dim, "state_dim": state_dim}
    inputs = scan_inputs(make, (2, 39, 3, 40), heads=2, groups=1, dtype=dtype, **sizes)
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


def test_tokens_and_heads_may_be_apart(make, match):
    inputs = scan_inputs(make, (37, 2), dtype=BF16)
    whole = make.normal(39, 60, dtype=BF16)
    inputs["x"] = whole[:, 1:25].unflatten(1, (4, 6))[:, :, 1:5]
    inputs["B"] = whole[:, 25:41].unflatten(1, (2, 8))
    inputs["C"] = whole[:, 41:57].unflatten(1, (2, 8))
    inputs["dt"] = whole[:, 56:]
    inputs["z"] = make.normal(39, 4, 9, dtype=BF16)[:, :, 2:6]
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])
    for name in ("x", "B", "C", "z"):
        inputs[name] = inputs[name].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    inputs["dt"] = inputs["dt"].t().contiguous().t()
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


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
        pytest.param({"z": torch.linspace(-4, 4, 28 * 16).view(28, 4, 4)}, id="z"),
        pytest.param({"z": torch.linspace(-4, 4, 28 * 16).view(28, 4, 4).bfloat16()}, id="bf16 z"),
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


def test_any_step_before_the_softplus(make, match):
    inputs = scan_inputs(make, (35,)) | {"dt_bias": None}
    inputs["dt"] = torch.linspace(-90, 90, 35 * 4).view(35, 4)
    inputs["A"] = -make.uniform(4, low=1e-3, high=1e-2)
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


def test_nan_stays_in_its_head(make, match):
    inputs = scan_inputs(make, (35, 3)) | {"dt_limit": (0.1, 0.9)}
    inputs["dt"][0, 1] = inputs["x"][35, 2, 3] = torch.nan
    match(ssd_scan, reference.ssd_scan, inputs, ["state"])


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


def checkpoint_inputs(make, lengths, checkpoints, **sizes):
    """Rows as of scan_inputs, and checkpoints (token -> slot) in slots that are NaN."""
    inputs = scan_inputs(make, lengths, **sizes)
    slots = make.int64(*checkpoints.values())
    rows = {name: inputs[name] for name in ("read_slots", "write_slots", "has_initial_state")}
    rows["write_slots"] = torch.cat([rows["write_slots"], slots])
    state = make.state(rows, inputs["state"].shape[1:], inputs["state"].dtype)
    tokens = make.int64(*checkpoints)
    return inputs | {"state": state, "checkpoint_tokens": tokens, "checkpoint_slots": slots}


@pytest.mark.parametrize(
    "checkpoints",
    [
        pytest.param({}, id="none"),
        pytest.param({0: 10}, id="first token"),
        pytest.param({69: 10}, id="row end"),
        pytest.param({31: 10, 63: 11}, id="chunk ends"),
        pytest.param({30: 10, 31: 11, 32: 12, 33: 13, 50: 14}, id="several in one row"),
        pytest.param({5: 10, 70: 11, 73: 12, 74: 13, 113: 14}, id="several rows"),
        pytest.param({5: 10, 40: 0, 72: 11}, id="no slot"),
        pytest.param({5: 10, 114: 11}, id="past the last row"),
    ],
)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F32, F32), (BF16, BF16), (F32, F64)])
def test_checkpoints(make, match, run, checkpoints, dtype, state_dtype):
    inputs = checkpoint_inputs(
        make, (70, 4, 40, 3), checkpoints, dtype=dtype, state_dtype=state_dtype
    )
    inputs["cu_seqlens"][4:] = 114  # the last row is empty
    results = match(ssd_scan, reference.ssd_scan, inputs, ["state"])
    written = {slot for token, slot in checkpoints.items() if slot and token < 114}
    assert all(results["state"][slot].isfinite().all() for slot in written)
    plain = inputs | {"checkpoint_tokens": None, "checkpoint_slots": None}
    before = run(ssd_scan, plain, ["state"])["state"]
    kept = [slot for slot in range(len(before)) if slot not in {*range(5, 9), *written}]
    torch.testing.assert_close(results["state"][kept], before[kept], rtol=0, atol=0, equal_nan=True)


def test_checkpoints_of_one_token(make, run):
    inputs = checkpoint_inputs(make, (40,), {7: 10, 39: 12})
    once = run(ssd_scan, inputs, ["state"])["state"]
    inputs["checkpoint_tokens"] = make.int64(7, 7, 39)
    inputs["checkpoint_slots"] = make.int64(10, 11, 12)
    state = run(ssd_scan, inputs, ["state"])["state"]
    assert torch.equal(state[10], once[10])
    assert torch.equal(state[11], once[10])
    assert torch.equal(state[12], state[2])


@pytest.mark.parametrize("token", [0, 2, 3, 4, 15, 31, 32, 63, 64, 65, 69])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_checkpoint_is_the_state_of_a_row_that_ends_there(make, run, token, state_dtype):
    sizes = {"head_dim": 7, "state_dim": 19, "dtype": BF16, "state_dtype": state_dtype}
    inputs = checkpoint_inputs(make, (70,), {token: 3}, **sizes)
    results = run(ssd_scan, inputs, ["state"])
    shorter = inputs | {"cu_seqlens": make.int32(0, token + 1)}
    shorter |= {"checkpoint_tokens": None, "checkpoint_slots": None}
    ended = run(ssd_scan, shorter, ["state"])
    assert torch.equal(results["state"][3], ended["state"][2])
    assert torch.equal(results["out"][: token + 1], ended["out"][: token + 1])


@pytest.mark.parametrize("token", [0, 31, 40, 66])
def test_row_that_goes_on_from_a_checkpoint_is_the_same(make, run, backend, token):
    inputs = checkpoint_inputs(make, (70,), {token: 3}, head_dim=7, state_dim=19)
    results = run(ssd_scan, inputs, ["state"])
    rest = {name: inputs[name][token + 1 :] for name in ("x", "dt", "B", "C")}
    rest |= {"cu_seqlens": make.int32(0, 69 - token), "state": results["state"]}
    rest |= {"read_slots": make.int64(3), "write_slots": make.int64(2)}
    rest |= {"checkpoint_tokens": None, "checkpoint_slots": None}
    resumed = run(ssd_scan, inputs | rest, ["state"])
    # How torch sums a product depends on where it lies in memory.
    exact = {"rtol": 0, "atol": 0} if backend == "native" else {}
    torch.testing.assert_close(results["out"][token + 1 :], resumed["out"], **exact)
    torch.testing.assert_close(results["state"][2], resumed["state"][2], **exact)


def test_checkpoint_of_a_null_row_is_not_stored(make, run):
    inputs = checkpoint_inputs(make, (5, 9, 6), {3: 10, 5: 11, 13: 12, 19: 13})
    inputs["write_slots"][1] = 0
    results = run(ssd_scan, inputs, ["state"])
    assert results["state"][[10, 13]].isfinite().all()
    assert results["state"][[11, 12]].isnan().all()
    assert (results["out"][5:14] == 0).all()


def test_slots_far_apart_in_memory(make, run, tmp_path):
    inputs = scan_inputs(make, (34, 3, 2), head_dim=3, state_dim=5)  # reads slots 1 and 3
    inputs |= {"checkpoint_tokens": make.int64(20), "checkpoint_slots": make.int64(7)}
    expected = run(ssd_scan, inputs, ["state"])
    near, stride = inputs["state"], 2**30 + 24
    # A file with holes: what nobody touches takes no space.
    file = torch.from_file(
        str(tmp_path / "state"), shared=True, size=(len(near) - 1) * stride + 60, dtype=F32
    )
    far = file.as_strided(near.shape, (stride, 15, 5, 1))
    far.copy_(near)
    assert torch.equal(ssd_scan(**(inputs | {"state": far})), expected["out"])
    torch.testing.assert_close(far, expected["state"], rtol=0, atol=0, equal_nan=True)


class TestRounding:
    """Stochastic rounding of 16-bit states."""

    def inputs(self, make, lengths, checkpoints, state_dtype, **sizes):
        inputs = checkpoint_inputs(make, lengths, checkpoints, state_dtype=state_dtype, **sizes)
        num_rows = len(lengths)
        rounding = StochasticRounding(
            seeds=make.int64(*range(3, 3 + num_rows)) << 35,
            positions=make.int64(*range(100, 100 + num_rows)),
            layer=7,
            first_element=50,
        )
        return inputs | {"rounding": rounding}

    @pytest.mark.parametrize("state_dtype", [F32, BF16, F16])
    def test_is_as_exact_as_plain_torch(self, make, match, state_dtype):
        inputs = self.inputs(make, (40, 3, 0), {7: 10, 41: 11}, state_dtype)
        match(ssd_scan, reference.ssd_scan, inputs, ["state"])

    @pytest.mark.parametrize("state_dtype", [BF16, F16])
    @pytest.mark.parametrize(("head_dim", "state_dim"), [(4, 8), (3, 17)])
    def test_rounds_the_wide_state_of_each_token(self, make, run, state_dtype, head_dim, state_dim):
        lengths, sizes = (40, 3), {"head_dim": head_dim, "state_dim": state_dim}
        inputs = self.inputs(make, lengths, {7: 10, 41: 11}, state_dtype, **sizes)
        rounded = run(ssd_scan, inputs, ["state"])["state"]
        wide = run(ssd_scan, inputs | {"state": inputs["state"].float()}, ["state"])["state"]
        # write slot or checkpoint -> row, token in the row
        for slot, row, token in [(3, 0, 39), (4, 1, 2), (10, 0, 7), (11, 1, 1)]:
            bits = inputs["rounding"].bits(row, wide[slot].shape, offset=token)
            expected = round_stochastically(wide[slot], state_dtype, bits)
            assert torch.equal(rounded[slot], expected)
            assert not torch.equal(rounded[slot], wide[slot].to(state_dtype))

    def test_wide_state_is_not_rounded(self, make, run):
        inputs = self.inputs(make, (40, 3), {7: 10}, F32)
        rounded = run(ssd_scan, inputs, ["state"])
        plain = run(ssd_scan, inputs | {"rounding": None}, ["state"])
        written = [3, 4, 10]
        assert torch.equal(rounded["state"][written], plain["state"][written])

    def test_empty_row_keeps_its_state(self, make, run):
        inputs = self.inputs(make, (0,), {}, BF16)
        state = run(ssd_scan, inputs, ["state"])["state"]
        assert torch.equal(state[2], inputs["state"][1])


class TestNative:
    """What only C code promises."""

    @pytest.fixture
    def backend(self, native_backend):
        return native_backend

    @pytest.mark.parametrize("lengths", [(70,), (33, 1, 40)])
    def test_threads_do_not_change_a_bit(self, make, run, lengths):
        sizes = {"heads": 5, "groups": 1, "head_dim": 16, "state_dim": 32}
        inputs = scan_inputs(make, lengths, dtype=BF16, **sizes)
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(run(ssd_scan, inputs, ["state"]))
        for other in results[1:]:
            assert torch.equal(other["out"], results[0]["out"])
            written = inputs["write_slots"]
            assert torch.equal(other["state"][written], results[0]["state"][written])

    def test_scratch_of_a_small_call_serves_a_larger_one(self, make, match):
        for size in (3, 40, 5, 90):
            inputs = scan_inputs(make, (size,), head_dim=size, state_dim=size + 1)
            match(ssd_scan, reference.ssd_scan, inputs, ["state"])


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
        ({"z": torch.ones(5, 4, 3)}, ShapeError, r"z: expected shape \(T=5, H=4, P=2\), got"),
        ({"checkpoint_tokens": torch.tensor([1])}, KernelError, r"checkpoint_slots: .* got one"),
        ({"checkpoint_slots": torch.tensor([1])}, KernelError, r"checkpoint_tokens, .* got one"),
        (
            {"checkpoint_tokens": torch.tensor([1]), "checkpoint_slots": torch.tensor([1, 2])},
            ShapeError,
            r"checkpoint_slots: expected shape \(E=1\), got \(2,\)",
        ),
        (
            {"checkpoint_tokens": torch.tensor([1.0]), "checkpoint_slots": torch.tensor([1])},
            DtypeError,
            r"checkpoint_tokens: expected torch.int64, got torch.float32",
        ),
        (
            {"checkpoint_tokens": torch.tensor([2, 1]), "checkpoint_slots": torch.tensor([1, 2])},
            KernelError,
            r"checkpoint_tokens: expected ascending tokens, got \[2, 1\]",
        ),
        (
            {
                "rounding": StochasticRounding(
                    seeds=torch.tensor([1, 2]), positions=torch.tensor([0]), layer=0
                )
            },
            ShapeError,
            r"rounding.seeds: expected shape \(R=1\), got \(2,\)",
        ),
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
