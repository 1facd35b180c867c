"""selective_scan."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.native import NativeLibrary
from plait.kernels.rounding import StochasticRounding, round_stochastically
from plait.kernels.selective_scan import reference, selective_scan
from plait.kernels.selective_state_update import selective_state_update

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# The chunk of the C code and that of torch have 32 tokens.
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 300]
FUNCTIONS = NativeLibrary(Path(__file__).with_name("state_functions.c"), decays="pppii")
TOKEN_INPUTS = ("x", "dt", "B", "C", "z")


def scan_inputs(make, lengths, *, channels=12, state_dim=5, dtype=F32, state_dtype=F32):
    rows = make.packed_rows(lengths)
    num_tokens = sum(lengths)
    return rows | {
        "x": make.normal(num_tokens, channels, dtype=dtype),
        "dt": make.normal(num_tokens, channels, dtype=dtype),
        "A": -make.uniform(channels, state_dim, low=0.1, high=4.0),
        "B": make.normal(num_tokens, state_dim, dtype=dtype),
        "C": make.normal(num_tokens, state_dim, dtype=dtype),
        "state": make.state(rows, (channels, state_dim), state_dtype),
        "D": make.normal(channels),
        "z": make.normal(num_tokens, channels, dtype=dtype),
        "dt_bias": make.normal(channels),
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
    match(selective_scan, reference.selective_scan, inputs, ["state"])


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length(make, match, length):
    # The first row starts from a state, the second one from zeros.
    inputs = scan_inputs(make, (length, length))
    match(selective_scan, reference.selective_scan, inputs, ["state"])


# One, below, at and above a vector of any instruction set and a block of channels.
@pytest.mark.parametrize(
    ("channels", "state_dim"),
    [(1, 1), (3, 4), (7, 16), (8, 17), (15, 8), (16, 3), (17, 33), (63, 2), (64, 16), (130, 16)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_dims(make, match, channels, state_dim, dtype):
    sizes = {"channels": channels, "state_dim": state_dim}
    inputs = scan_inputs(make, (2, 39, 3), dtype=dtype, **sizes)
    match(selective_scan, reference.selective_scan, inputs, ["state"])


def test_arguments_may_be_columns_of_wider_matrices(make, run):
    inputs = scan_inputs(make, (40, 3), dtype=BF16)
    wide = make.normal(43, 60, dtype=BF16)
    starts = {"x": (0, 12), "dt": (13, 12), "B": (25, 5), "C": (30, 5), "z": (41, 12)}
    columns = {name: wide.narrow(1, *where) for name, where in starts.items()}
    copies = {name: value.contiguous() for name, value in columns.items()}
    expected = run(selective_scan, inputs | copies, ["state"])
    transposed = {name: value.t().contiguous().t() for name, value in columns.items()}
    for views in (columns, transposed):
        results = run(selective_scan, inputs | views, ["state"])
        for name, value in results.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wide", ["dt", "z", "x"])
def test_dtypes_may_be_mixed(make, match, wide):
    inputs = scan_inputs(make, (40, 3), dtype=BF16)
    inputs[wide] = inputs[wide].float()
    match(selective_scan, reference.selective_scan, inputs, ["state"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"D": None}, id="no D"),
        pytest.param({"z": None}, id="no z"),
        pytest.param({"dt_bias": None}, id="no dt_bias"),
        pytest.param({"dt_softplus": False}, id="no softplus"),
        pytest.param({"dt_limit": (0.3, 0.9)}, id="dt_limit"),
        pytest.param(
            {"D": None, "z": None, "dt_bias": None, "dt_softplus": False}, id="none of them"
        ),
    ],
)
def test_optional_arguments(make, match, run, options):
    inputs = scan_inputs(make, (41, 7))
    base = run(selective_scan, inputs, ["state"])["out"]
    out = match(selective_scan, reference.selective_scan, inputs | options, ["state"])["out"]
    assert not torch.allclose(out, base)


def test_is_the_mixer_of_transformers(make):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=8, hidden_size=12, state_size=5, num_hidden_layers=1, time_step_rank=3
    )
    mixer = MambaMixer(config, layer_idx=0).eval()
    torch.nn.init.normal_(mixer.D)
    mixer.A_log.data += 0.3 * torch.randn_like(mixer.A_log)
    tokens = make.normal(37, 12)
    with torch.inference_mode():
        expected = mixer(tokens[None])[0]
        x, z = mixer.in_proj(tokens).chunk(2, dim=1)
        x = F.silu(mixer.conv1d(x.t()[None])[0, :, :37].t())
        dt, B, C = mixer.x_proj(x).split([3, 5, 5], dim=1)
        channels = config.intermediate_size
        out = selective_scan(
            x,
            dt @ mixer.dt_proj.weight.t(),
            -mixer.A_log.exp(),
            B,
            C,
            make.normal(2, channels, 5),
            cu_seqlens=make.int32(0, 37),
            read_slots=make.int64(0),
            write_slots=make.int64(1),
            has_initial_state=make.int64(0) > 0,
            D=mixer.D,
            z=z,
            dt_bias=mixer.dt_proj.bias,
        )
        torch.testing.assert_close(mixer.out_proj(out), expected)


def test_equals_the_closed_form(make):
    inputs = scan_inputs(make, (9,), channels=3, state_dim=2, dtype=F64, state_dtype=F64)
    inputs |= {"dt_softplus": False, "dt_bias": None, "z": None}
    x, dt, A, h = inputs["x"], inputs["dt"].clamp(min=0), inputs["A"].double(), inputs["state"][1]
    B, C = inputs["B"], inputs["C"]
    expected = inputs["D"].double() * x
    for i in range(9):
        for j in range(i + 1):
            decay = torch.exp(A * dt[j + 1 : i + 1].sum(0)[:, None])  # (C, N)
            expected[i] += dt[j] * x[j] * ((decay * B[j]) @ C[i])
        expected[i] += (torch.exp(A * dt[: i + 1].sum(0)[:, None]) * h) @ C[i]
    torch.testing.assert_close(selective_scan(**inputs), expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decode_continues_prefill(make, match, dtype):
    """A scan, then token by token with selective_state_update, is what one scan gives."""
    inputs = scan_inputs(make, (40,), dtype=dtype)

    def in_two_ways(*, read_slots, write_slots, cu_seqlens, has_initial_state, state, **rest):
        first = {name: rest[name][:33] for name in TOKEN_INPUTS}
        outs = [
            selective_scan(
                **(rest | first),
                state=state,
                cu_seqlens=cu_seqlens - torch.tensor([0, 7], dtype=torch.int32),
                read_slots=read_slots,
                write_slots=write_slots,
                has_initial_state=has_initial_state,
            )
        ]
        heads = state.unsqueeze(2)  # heads of one channel
        for t in range(33, 40):
            one = {name: rest[name][t, None] for name in TOKEN_INPUTS}
            one |= {name: one[name][:, :, None] for name in ("x", "z")}
            one |= {name: one[name][:, None] for name in ("B", "C")}
            slots = {"read_slots": write_slots, "write_slots": write_slots}
            outs.append(selective_state_update(**(rest | one), state=heads, **slots).squeeze(-1))
        return torch.cat(outs)

    match(in_two_ways, reference.selective_scan, inputs, ["state"])


@pytest.mark.parametrize("cuts", [(1,), (4,), (31,), (32,), (3, 4, 40)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_split_anywhere_equals_one_pass(make, run, backend, cuts, dtype):
    inputs = scan_inputs(make, (70,), dtype=dtype, state_dim=16)
    whole = run(selective_scan, inputs, ["state"])
    state, outs, source = inputs["state"], [], inputs["read_slots"]
    for start, stop in zip((0, *cuts), (*cuts, 70), strict=True):
        piece = {name: inputs[name][start:stop] for name in TOKEN_INPUTS}
        piece |= {"cu_seqlens": make.int32(0, stop - start), "read_slots": source, "state": state}
        results = run(selective_scan, inputs | piece, ["state"])
        outs.append(results["out"])
        state, source = results["state"], inputs["write_slots"]
    # How torch sums a product depends on where it lies in memory.
    exact = {"rtol": 0, "atol": 0} if backend == "native" else {}
    torch.testing.assert_close(torch.cat(outs), whole["out"], **exact)
    torch.testing.assert_close(state[2], whole["state"][2], **exact)


def test_any_step_before_the_softplus(make, match):
    inputs = scan_inputs(make, (35,)) | {"dt_bias": None}
    inputs["dt"] = torch.linspace(-90, 90, 35 * 12).view(35, 12)
    inputs["A"] = -make.uniform(12, 5, low=1e-3, high=1e-2)
    match(selective_scan, reference.selective_scan, inputs, ["state"])


def test_any_decay(make, match):
    inputs = scan_inputs(make, (130,)) | {"A": -make.uniform(12, 5, low=-5, high=5).exp()}
    inputs["A"][0] = torch.tensor([0.0, -1e-30, -1.0, -1e4, -1e30])
    inputs["dt"] = make.uniform(130, 12, low=-8.0, high=8.0)
    results = match(selective_scan, reference.selective_scan, inputs, ["state"])
    assert results["out"].isfinite().all()


def test_one_strong_decay_does_not_change_a_bit_of_others(make, run, backend):
    inputs = scan_inputs(make, (40,))
    plain = run(selective_scan, inputs, ["state"])
    inputs["A"] = inputs["A"].clone()
    inputs["A"][5, 3] = -1e6
    results = run(selective_scan, inputs, ["state"])
    kept = [channel for channel in range(12) if channel != 5]
    assert torch.equal(results["state"][2][kept], plain["state"][2][kept])
    assert not torch.equal(results["state"][2][5], plain["state"][2][5])


def test_nan_stays_where_it_comes_in(make, run):
    inputs = scan_inputs(make, (40,))
    for name, where in (("x", (3, 2)), ("dt", (4, 7)), ("z", (5, 9))):
        inputs[name][where] = math.nan
    results = run(selective_scan, inputs, ["state"])
    out, expected = results["out"].isnan(), torch.zeros(40, 12, dtype=torch.bool)
    expected[3:, 2] = expected[4:, 7] = expected[5, 9] = True
    assert torch.equal(out, expected)
    assert results["state"][2].isnan().any(dim=1).nonzero().flatten().tolist() == [2, 7]


def test_a_row_does_not_see_its_neighbours(make, run):
    inputs = scan_inputs(make, (41, 7))
    alone = {name: inputs[name][41:] for name in TOKEN_INPUTS}
    alone |= {name: inputs[name][1:] for name in ("read_slots", "write_slots", "has_initial_state")}
    alone["cu_seqlens"] = make.int32(0, 7)
    both = run(selective_scan, inputs, ["state"])
    one = run(selective_scan, inputs | alone, ["state"])
    torch.testing.assert_close(both["out"][41:], one["out"])
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
    results = match(selective_scan, reference.selective_scan, inputs, ["state"])
    written = {slot for token, slot in checkpoints.items() if slot and token < 114}
    assert all(results["state"][slot].isfinite().all() for slot in written)
    plain = inputs | {"checkpoint_tokens": None, "checkpoint_slots": None}
    before = run(selective_scan, plain, ["state"])["state"]
    kept = [slot for slot in range(len(before)) if slot not in {*range(5, 9), *written}]
    torch.testing.assert_close(results["state"][kept], before[kept], rtol=0, atol=0, equal_nan=True)


def test_checkpoints_of_one_token(make, run):
    inputs = checkpoint_inputs(make, (40,), {7: 10, 39: 12})
    once = run(selective_scan, inputs, ["state"])["state"]
    inputs["checkpoint_tokens"] = make.int64(7, 7, 39)
    inputs["checkpoint_slots"] = make.int64(10, 11, 12)
    state = run(selective_scan, inputs, ["state"])["state"]
    assert torch.equal(state[10], once[10])
    assert torch.equal(state[11], once[10])
    assert torch.equal(state[12], state[2])


@pytest.mark.parametrize("token", [0, 2, 15, 31, 32, 63, 64, 69])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_checkpoint_is_the_state_of_a_row_that_ends_there(make, run, token, state_dtype):
    sizes = {"channels": 70, "state_dim": 16, "dtype": BF16, "state_dtype": state_dtype}
    inputs = checkpoint_inputs(make, (70,), {token: 3}, **sizes)
    inputs["dt"][token + 1 :] = 100.0  # what comes later must not matter
    results = run(selective_scan, inputs, ["state"])
    shorter = inputs | {"cu_seqlens": make.int32(0, token + 1)}
    shorter |= {"checkpoint_tokens": None, "checkpoint_slots": None}
    ended = run(selective_scan, shorter, ["state"])
    assert torch.equal(results["state"][3], ended["state"][2])
    assert torch.equal(results["out"][: token + 1], ended["out"][: token + 1])


@pytest.mark.parametrize("token", [0, 31, 40, 68])
def test_row_that_goes_on_from_a_checkpoint_is_the_same(make, run, backend, token):
    inputs = checkpoint_inputs(make, (70,), {token: 3}, channels=20, state_dim=16)
    results = run(selective_scan, inputs, ["state"])
    rest = {name: inputs[name][token + 1 :] for name in TOKEN_INPUTS}
    rest |= {"cu_seqlens": make.int32(0, 69 - token), "state": results["state"]}
    rest |= {"read_slots": make.int64(3), "write_slots": make.int64(2)}
    rest |= {"checkpoint_tokens": None, "checkpoint_slots": None}
    resumed = run(selective_scan, inputs | rest, ["state"])
    exact = {"rtol": 0, "atol": 0} if backend == "native" else {}
    torch.testing.assert_close(results["out"][token + 1 :], resumed["out"], **exact)
    torch.testing.assert_close(results["state"][2], resumed["state"][2], **exact)


def test_checkpoint_of_a_null_row_is_not_stored(make, run):
    inputs = checkpoint_inputs(make, (5, 9, 6), {3: 10, 5: 11, 13: 12, 19: 13})
    inputs["write_slots"][1] = 0
    results = run(selective_scan, inputs, ["state"])
    assert results["state"][[10, 13]].isfinite().all()
    assert results["state"][[11, 12]].isnan().all()
    assert (results["out"][5:14] == 0).all()


def test_slots_far_apart_in_memory(make, run, tmp_path):
    inputs = checkpoint_inputs(make, (34, 3), {20: 5}, channels=3)
    expected = run(selective_scan, inputs, ["state"])
    near, stride = inputs["state"], 2**30 + 24
    # A file with holes: what nobody touches takes no space.
    file = torch.from_file(
        str(tmp_path / "state"), shared=True, size=(len(near) - 1) * stride + 15, dtype=F32
    )
    far = file.as_strided(near.shape, (stride, 5, 1))
    far.copy_(near)
    assert torch.equal(selective_scan(**(inputs | {"state": far})), expected["out"])
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
        match(selective_scan, reference.selective_scan, inputs, ["state"])

    @pytest.mark.parametrize("state_dtype", [BF16, F16])
    @pytest.mark.parametrize(("channels", "state_dim"), [(4, 16), (70, 5)])
    def test_rounds_the_wide_state_of_each_token(self, make, run, state_dtype, channels, state_dim):
        sizes = {"channels": channels, "state_dim": state_dim}
        inputs = self.inputs(make, (40, 3), {7: 10, 41: 11}, state_dtype, **sizes)
        rounded = run(selective_scan, inputs, ["state"])["state"]
        wide = run(selective_scan, inputs | {"state": inputs["state"].float()}, ["state"])["state"]
        # write slot or checkpoint -> row, token in the row
        for slot, row, token in [(3, 0, 39), (4, 1, 2), (10, 0, 7), (11, 1, 1)]:
            bits = inputs["rounding"].bits(row, wide[slot].shape, offset=token)
            expected = round_stochastically(wide[slot], state_dtype, bits)
            assert torch.equal(rounded[slot], expected)
            assert not torch.equal(rounded[slot], wide[slot].to(state_dtype))

    def test_wide_state_is_not_rounded(self, make, run):
        inputs = self.inputs(make, (40, 3), {7: 10}, F32)
        rounded = run(selective_scan, inputs, ["state"])
        plain = run(selective_scan, inputs | {"rounding": None}, ["state"])
        written = [3, 4, 10]
        assert torch.equal(rounded["state"][written], plain["state"][written])

    def test_empty_row_keeps_its_state(self, make, run):
        inputs = self.inputs(make, (0,), {}, BF16)
        state = run(selective_scan, inputs, ["state"])["state"]
        assert torch.equal(state[2], inputs["state"][1])


class TestNative:
    """What only C code promises."""

    @pytest.fixture
    def backend(self, native_backend):
        return native_backend

    def test_decays_are_exact_to_a_unit_in_the_last_place(self, make):
        steps = make.uniform(1 << 16, low=-8.0, high=4.0).exp()
        rates = -make.uniform(1 << 16, low=-4.0, high=3.0).exp()
        results = []
        for is_bounded in (True, False):
            decays = torch.empty(1 << 16)
            FUNCTIONS.load().decays(
                steps.data_ptr(), rates.data_ptr(), decays.data_ptr(), is_bounded, 1 << 16
            )
            results.append(decays)
        log2e = torch.tensor(1.44269504)
        power = steps * (rates * log2e)
        kept = power.abs() < 126
        assert torch.equal(results[0][kept], results[1][kept])
        exact = torch.exp2(steps.double() * (rates * log2e).double())[kept]
        ulps = (results[1][kept] - exact).abs() / (exact * torch.finfo(F32).eps)
        # Without fused operations the product is rounded too.
        assert (ulps < 1 + power[kept].abs()).all()
        assert ulps[power[kept].abs() < 1].max() < 2

    def test_decays_at_the_limits(self):
        inf, nan = math.inf, math.nan
        steps = torch.tensor([0.0, 0.0, 1.0, 1.0, 1e30, inf, 1.0, 1.0, nan, 1.0, 1.0, 0.0])
        rates = torch.tensor([-1.0, 9.0, 0.0, -inf, -1e30, -1.0, 90.0, inf, -1.0, nan, -90.0, 0.0])
        steps, rates = (torch.cat([value, value.new_zeros(4)]) for value in (steps, rates))
        decays = torch.empty(16)
        FUNCTIONS.load().decays(steps.data_ptr(), rates.data_ptr(), decays.data_ptr(), False, 16)
        expected = torch.tensor([1, 1, 1, 0, 0, 0, inf, inf, nan, nan, 0, 1, 1, 1, 1, 1.0])
        torch.testing.assert_close(decays, expected, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("lengths", [(70,), (33, 1, 40)])
    def test_threads_do_not_change_a_bit(self, make, run, lengths):
        inputs = scan_inputs(make, lengths, channels=150, state_dim=16, dtype=BF16)
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(run(selective_scan, inputs, ["state"]))
        written = inputs["write_slots"]
        for other in results[1:]:
            assert torch.equal(other["out"], results[0]["out"])
            assert torch.equal(other["state"][written], results[0]["state"][written])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dt": torch.ones(5, 3)}, ShapeError, r"dt: expected shape \(T=5, C=4\), got \(5, 3\)"),
        ({"A": torch.ones(4)}, ShapeError, r"A: expected shape \(C=4, N\), got \(4,\)"),
        ({"A": torch.ones(4, 8).half()}, DtypeError, r"A: expected torch.float64 or torch.float3"),
        ({"B": torch.ones(5, 9)}, ShapeError, r"B: expected shape \(T=5, N=8\), got \(5, 9\)"),
        ({"C": torch.ones(4, 8)}, ShapeError, r"C: expected shape \(T=5, N=8\), got \(4, 8\)"),
        ({"D": torch.ones(3)}, ShapeError, r"D: expected shape \(C=4\), got \(3,\)"),
        ({"z": torch.ones(5, 3)}, ShapeError, r"z: expected shape \(T=5, C=4\), got \(5, 3\)"),
        ({"dt_bias": torch.ones(3)}, ShapeError, r"dt_bias: expected shape \(C=4\), got \(3,\)"),
        ({"state": torch.ones(3, 4, 9)}, ShapeError, r"state: .*N=8\), got \(3, 4, 9\)"),
        ({"state": torch.ones(3, 8, 4).mT}, ShapeError, r"state: expected contiguous dims"),
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
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(5, 4),
        "dt": torch.ones(5, 4),
        "A": -torch.ones(4, 8),
        "B": torch.ones(5, 8),
        "C": torch.ones(5, 8),
        "state": torch.ones(3, 4, 8),
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "read_slots": torch.tensor([1]),
        "write_slots": torch.tensor([1]),
        "has_initial_state": torch.tensor([True]),
    }
    selective_scan(**inputs)
    with pytest.raises(error, match=message):
        selective_scan(**(inputs | change))
