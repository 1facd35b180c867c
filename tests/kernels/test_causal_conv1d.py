"""causal_conv1d_prefill and causal_conv1d_update."""

import pytest
import torch
import torch.nn.functional as F

from plait.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update, reference
from plait.kernels.errors import BackendError, DtypeError, KernelError, ShapeError

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def prefill_inputs(make, lengths, *, channels=6, width=4, dtype=F32, state_dtype=F32):
    rows = make.packed_rows(lengths)
    return rows | {
        "x": make.normal(sum(lengths), channels, dtype=dtype),
        "weight": make.normal(channels, width, dtype=dtype),
        "bias": make.normal(channels, dtype=dtype),
        "state": make.state(rows, (width - 1, channels), state_dtype),
    }


def update_inputs(make, num_rows, *, channels=6, width=4, dtype=F32, state_dtype=F32):
    rows = make.decode_rows(num_rows)
    return rows | {
        "x": make.normal(num_rows, channels, dtype=dtype),
        "weight": make.normal(channels, width, dtype=dtype),
        "bias": make.normal(channels, dtype=dtype),
        "state": make.state(rows, (width - 1, channels), state_dtype),
    }


DTYPES = [
    pytest.param(F32, F32, id="base"),
    pytest.param(BF16, BF16, id="bf16"),
    pytest.param(BF16, F32, id="bf16 with fp32 state"),
    pytest.param(F32, BF16, id="fp32 with bf16 state"),
    pytest.param(BF16, F16, id="bf16 with fp16 state"),
    pytest.param(F16, F16, id="fp16"),
    pytest.param(F16, F32, id="fp16 with fp32 state"),
    pytest.param(F16, BF16, id="fp16 with bf16 state"),
    pytest.param(F32, F16, id="fp32 with fp16 state"),
    pytest.param(F64, F64, id="fp64"),
    pytest.param(F32, F64, id="fp32 with fp64 state"),
]
# One, below, at and above a vector of any instruction set, and the blocks of channels in C.
CHANNELS = [1, 3, 4, 7, 8, 9, 15, 16, 17, 127, 128, 129, 300]


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_prefill_is_as_exact_as_plain_torch(make, match, dtype, state_dtype):
    inputs = prefill_inputs(make, (7, 1, 2, 3, 0, 65, 4), dtype=dtype, state_dtype=state_dtype)
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 300])
def test_prefill_takes_any_length(make, match, length):
    inputs = prefill_inputs(make, (length,))
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_update_is_as_exact_as_plain_torch(make, match, dtype, state_dtype):
    inputs = update_inputs(make, 5, dtype=dtype, state_dtype=state_dtype)
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


@pytest.mark.parametrize("width", range(1, 9))
def test_every_width(make, match, width):
    inputs = prefill_inputs(make, (5, 9, 1), width=width)
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs = update_inputs(make, 3, width=width)
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [True, False])
def test_optional_arguments(make, match, activation, has_bias):
    options = {"activation": activation} | ({} if has_bias else {"bias": None})
    inputs = prefill_inputs(make, (5, 2)) | options
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs = update_inputs(make, 3) | options
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


def test_one_sequence_equals_the_convolution_of_torch(make):
    inputs = prefill_inputs(make, (9,), dtype=F64, state_dtype=F64)
    inputs["has_initial_state"] = inputs["has_initial_state"] & False
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    padded = F.pad(x.t(), (3, 0)).unsqueeze(0)
    expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=6))[0].t()
    torch.testing.assert_close(causal_conv1d_prefill(**inputs), expected)
    torch.testing.assert_close(inputs["state"][2], x[-3:])


@pytest.mark.parametrize("cut", range(1, 9))
def test_split_anywhere_equals_one_pass(make, match, cut):
    inputs = prefill_inputs(make, (9,))

    def in_two(*, x, state, read_slots, write_slots, **rest):
        del rest["cu_seqlens"], rest["has_initial_state"]
        outs = []
        for part, source in ((x[:cut], read_slots), (x[cut:], write_slots)):
            cu_seqlens = make.int32(0, len(part))
            outs.append(
                causal_conv1d_prefill(
                    part,
                    state=state,
                    cu_seqlens=cu_seqlens,
                    read_slots=source,
                    write_slots=write_slots,
                    has_initial_state=source > 0,
                    **rest,
                )
            )
        return torch.cat(outs)

    match(in_two, reference.causal_conv1d_prefill, inputs, ["state"])


def test_decode_equals_prefill(make, match):
    inputs = prefill_inputs(make, (9,))

    def token_by_token(*, x, weight, bias, state, read_slots, write_slots, **_):
        slots = [read_slots, *[write_slots] * (len(x) - 1)]
        outs = [
            causal_conv1d_update(
                token[None], weight, bias, state, read_slots=slot, write_slots=write_slots
            )
            for token, slot in zip(x, slots, strict=True)
        ]
        return torch.cat(outs)

    match(token_by_token, reference.causal_conv1d_prefill, inputs, ["state"])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("channels", CHANNELS)
def test_any_number_of_channels(make, match, channels, dtype):
    inputs = prefill_inputs(make, (18, 2), channels=channels, dtype=dtype)
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs = update_inputs(make, 3, channels=channels, dtype=dtype)
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


def test_no_channels(make):
    assert causal_conv1d_prefill(**prefill_inputs(make, (5,), channels=0)).shape == (5, 0)
    assert causal_conv1d_update(**update_inputs(make, 5, channels=0)).shape == (5, 0)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_and_channels_on_several_threads(make, match, dtype):
    inputs = prefill_inputs(make, (33, 1, 20, 2), channels=389, dtype=dtype, state_dtype=dtype)
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs = update_inputs(make, 51, channels=389, dtype=dtype, state_dtype=dtype)
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


def test_update_of_slots_in_place(make, match):
    inputs = update_inputs(make, 20)
    inputs["write_slots"] = inputs["read_slots"]
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_arguments_may_have_gaps(make, match, dtype):
    inputs = prefill_inputs(make, (5, 2), dtype=dtype)
    inputs["x"] = make.normal(7, 20, dtype=dtype)[:, 3:9]
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs["x"] = make.normal(6, 7, dtype=dtype).t()
    inputs["weight"] = make.normal(4, 6, dtype=dtype).t()
    inputs["bias"] = make.normal(6, 2, dtype=dtype)[:, 1]
    for name in ("cu_seqlens", "read_slots", "write_slots", "has_initial_state"):
        inputs[name] = torch.stack([inputs[name], inputs[name]], dim=1)[:, 0]
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    inputs = {name: inputs[name] for name in update_inputs(make, 2)} | {"x": inputs["x"][:2]}
    match(causal_conv1d_update, reference.causal_conv1d_update, inputs, ["state"])


@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, F64])
def test_filter_of_another_dtype(make, match, weight_dtype):
    inputs = prefill_inputs(make, (5, 2), dtype=BF16)
    inputs |= {"weight": inputs["weight"].to(weight_dtype), "bias": make.normal(6)}
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_the_next_tokens_only(make, match, bad):
    inputs = prefill_inputs(make, (30,), channels=9)
    inputs["x"][4, 8] = bad
    results = match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])
    assert results["out"].isfinite().sum() >= 30 * 9 - 4


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_null_rows_and_tokens_past_the_last_row_are_zeros(make, run, dtype):
    inputs = prefill_inputs(make, (5, 18, 3, 20), channels=150, dtype=dtype)
    inputs["write_slots"][1] = 0
    inputs["cu_seqlens"][4] = 30
    inputs["x"][5:23] = inputs["x"][30:] = torch.nan
    results = run(causal_conv1d_prefill, inputs, ["state"])
    assert (results["out"][5:23] == 0).all()
    assert (results["out"][30:] == 0).all()
    live = torch.cat([results["out"][:5], results["out"][23:30]])
    assert live.isfinite().all()
    assert (live != 0).any(dim=1).all()
    assert results["state"].isfinite().all(dim=(1, 2)).nonzero().flatten().tolist() == [
        1,
        3,
        5,
        7,
        8,
    ]
    inputs = update_inputs(make, 20, channels=150, dtype=dtype)
    inputs["write_slots"][7] = 0
    inputs["x"][7] = torch.nan
    results = run(causal_conv1d_update, inputs, ["state"])
    assert (results["out"] != 0).any(dim=1).logical_not().nonzero().flatten().tolist() == [7]
    assert results["state"][0].isnan().all()
    assert results["state"][28].isnan().all()


def test_no_rows(make):
    inputs = prefill_inputs(make, (3,)) | {"cu_seqlens": make.int32(0)}
    inputs |= {"read_slots": make.int64(), "write_slots": make.int64()}
    inputs["has_initial_state"] = make.int64() > 0
    assert (causal_conv1d_prefill(**inputs) == 0).all()


def test_slots_far_apart(make, tmp_path):
    """Offsets beyond 2^31 elements, in a file with holes."""
    inputs = prefill_inputs(make, (5,)) | {"has_initial_state": make.int64(1) > 0}
    expected = causal_conv1d_prefill(**(inputs | {"state": inputs["state"].clone()}))
    slot_stride = 2**30 + 24
    file = torch.from_file(
        str(tmp_path / "state"), shared=True, size=3 * slot_stride + 18, dtype=torch.float32
    )
    far = file.as_strided((4, 3, 6), (slot_stride, 6, 1))
    far[3] = inputs["state"][1]
    slots = {"state": far, "read_slots": make.int64(3), "write_slots": make.int64(2)}
    assert torch.equal(causal_conv1d_prefill(**(inputs | slots)), expected)
    assert torch.equal(far[2], inputs["x"][-3:])
    inputs = update_inputs(make, 1)
    inputs |= slots | {"read_slots": make.int64(2), "write_slots": make.int64(3)}
    causal_conv1d_update(**inputs)
    assert torch.equal(far[3], torch.cat([far[2, 1:], inputs["x"]]))


class TestCheckpoints:
    LENGTHS = (7, 3, 40, 1)
    # Every token of the first row; beside, at and beyond ends of rows; the inside of a long row.
    TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 25, 26, 27, 49, 50)

    def inputs(self, make, *, width=4, dtype=F32, state_dtype=F32):
        inputs = prefill_inputs(make, self.LENGTHS, width=width, dtype=dtype)
        first = 10
        rows = {name: inputs[name] for name in ("read_slots", "has_initial_state")}
        rows["write_slots"] = make.int64(first + len(self.TOKENS))
        return inputs | {
            "state": make.state(rows, (width - 1, 6), state_dtype),
            "checkpoint_tokens": make.int64(*self.TOKENS),
            "checkpoint_slots": first + torch.arange(len(self.TOKENS), device=make.device),
        }

    @pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
    def test_are_as_exact_as_plain_torch(self, make, match, dtype, state_dtype):
        inputs = self.inputs(make, dtype=dtype, state_dtype=state_dtype)
        match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])

    @pytest.mark.parametrize(
        ("width", "dtype", "state_dtype"),
        [
            pytest.param(4, F32, F32, id="base"),
            pytest.param(1, F32, F32, id="width 1"),
            pytest.param(2, F32, F32, id="width 2"),
            pytest.param(8, F32, F32, id="width 8"),
            pytest.param(4, BF16, BF16, id="bf16"),
            pytest.param(4, BF16, F32, id="bf16 with fp32 state"),
            pytest.param(4, F32, F16, id="fp32 with fp16 state"),
        ],
    )
    @pytest.mark.parametrize("op", [causal_conv1d_prefill, reference.causal_conv1d_prefill])
    def test_equal_the_state_of_a_row_that_ends_there(
        self, make, run, op, width, dtype, state_dtype
    ):
        inputs = self.inputs(make, width=width, dtype=dtype, state_dtype=state_dtype)
        results = run(op, inputs, ["state"])
        del inputs["checkpoint_tokens"], inputs["checkpoint_slots"]
        whole = run(op, inputs, ["state"])
        assert torch.equal(results["out"], whole["out"])
        assert torch.equal(results["state"][:10].nan_to_num(), whole["state"][:10].nan_to_num())
        starts = inputs["cu_seqlens"].tolist()
        for slot, token in enumerate(self.TOKENS, start=10):
            row = max(r for r in range(len(self.LENGTHS)) if starts[r] <= token)
            cut = inputs | {"x": inputs["x"][starts[row] : token + 1]}
            cut["cu_seqlens"] = make.int32(0, token + 1 - starts[row])
            for name in ("read_slots", "write_slots", "has_initial_state"):
                cut[name] = inputs[name][row : row + 1]
            stopped = run(op, cut, ["state"])["state"][inputs["write_slots"][row]]
            assert stopped.isfinite().all()
            assert torch.equal(results["state"][slot], stopped), token

    @pytest.mark.parametrize("op", [causal_conv1d_prefill, reference.causal_conv1d_prefill])
    def test_null_rows_slots_and_other_tokens_store_nothing(self, make, run, op):
        inputs = self.inputs(make)
        inputs["write_slots"][1] = 0  # tokens 8 and 9
        inputs["cu_seqlens"][3:] = 49  # the last row is empty, tokens 49 and 50 are past it
        inputs["checkpoint_slots"][3] = 0
        state = run(op, inputs, ["state"])["state"]
        is_stored = [token not in (3, 8, 9, 49, 50) for token in self.TOKENS]
        assert state[10:25].isfinite().all(dim=(1, 2)).tolist() == is_stored
        assert state[10:25].isnan().all(dim=(1, 2)).tolist() == [not is_ for is_ in is_stored]
        assert state[0].isnan().all()
        none = {"checkpoint_tokens": make.int64(), "checkpoint_slots": make.int64()}
        state = run(op, inputs | none, ["state"])["state"]
        assert state[10:25].isnan().all()

    def test_a_row_in_place(self, make, run):
        inputs = self.inputs(make) | {"has_initial_state": make.int64(1, 1, 1, 1) > 0}
        inputs["state"][2] = inputs["state"][4] = make.normal(3, 6)
        apart = run(causal_conv1d_prefill, inputs, ["state"])["state"]
        inputs["write_slots"] = inputs["read_slots"]
        in_place = run(causal_conv1d_prefill, inputs, ["state"])["state"]
        assert torch.equal(in_place[10:25], apart[10:25])
        assert torch.equal(in_place[1:5], apart[5:9])

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"checkpoint_tokens": None}, KernelError, r"expected both or none"),
            ({"checkpoint_slots": None}, KernelError, r"checkpoint_tokens, checkpoint_slots: exp"),
            ({"checkpoint_tokens": torch.ones(15).int()}, DtypeError, r"checkpoint_tokens: .*int3"),
            ({"checkpoint_slots": torch.ones(3).long()}, ShapeError, r"checkpoint_slots: .*E=15"),
        ],
    )
    def test_refuses_bad_arguments(self, make, change, error, message):
        with pytest.raises(error, match=message):
            causal_conv1d_prefill(**(self.inputs(make) | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(5)}, ShapeError, r"x: expected shape \(T, C\), got \(5,\)"),
        ({"x": torch.ones(5, 6).int()}, DtypeError, r"x: expected torch.float64 or .* got torch.i"),
        ({"weight": torch.ones(5, 4)}, ShapeError, r"weight: .* \(C=6, W\), got \(5, 4\)"),
        ({"weight": torch.ones(6, 9)}, ShapeError, r"weight: expected W from 1 to 8, got W=9"),
        ({"bias": torch.ones(5)}, ShapeError, r"bias: expected shape \(C=6\), got \(5,\)"),
        ({"state": torch.ones(4, 4, 6)}, ShapeError, r"state: .*W-1=3, C=6\), got \(4, 4, 6\)"),
        ({"state": torch.ones(4, 6, 3).mT}, ShapeError, r"state: .*contiguous.*\(18, 1, 3\)"),
        ({"cu_seqlens": torch.ones(3).int()}, ShapeError, r"cu_seqlens: .*R\+1=2\), got \(3,\)"),
        ({"cu_seqlens": torch.ones(2).long()}, DtypeError, r"cu_seqlens: expected torch.int32"),
        ({"read_slots": torch.ones(1)}, DtypeError, r"read_slots: expected torch.int64, got"),
        ({"write_slots": torch.ones(2).long()}, ShapeError, r"write_slots: .*\(R=1\), got \(2,\)"),
        ({"has_initial_state": torch.ones(1)}, DtypeError, r"has_initial_state: expected torch.b"),
        ({"activation": "gelu"}, KernelError, r"activation: expected 'silu' or None, got 'gelu'"),
        ({"bias": torch.ones(6, device="meta")}, BackendError, r"bias: .* on cpu, got meta"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(5, 6),
        "weight": torch.ones(6, 4),
        "bias": None,
        "state": torch.ones(4, 3, 6),
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "read_slots": torch.tensor([1]),
        "write_slots": torch.tensor([1]),
        "has_initial_state": torch.tensor([False]),
    }
    causal_conv1d_prefill(**inputs)
    with pytest.raises(error, match=message):
        causal_conv1d_prefill(**(inputs | change))


def test_update_refuses_a_wrong_number_of_slots(make):
    inputs = update_inputs(make, 3) | {"read_slots": make.int64(1, 2)}
    with pytest.raises(ShapeError, match=r"read_slots: expected shape \(B=3\), got \(2,\)"):
        causal_conv1d_update(**inputs)
