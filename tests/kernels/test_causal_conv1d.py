"""causal_conv1d_prefill and causal_conv1d_update."""

import pytest
import torch
import torch.nn.functional as F

from plait.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update, reference
from plait.kernels.errors import BackendError, DtypeError, KernelError, ShapeError

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
    pytest.param(F64, F64, id="fp64"),
]


@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES)
def test_prefill_is_as_exact_as_plain_torch(make, match, dtype, state_dtype):
    inputs = prefill_inputs(make, (7, 1, 2, 3, 0, 65, 4), dtype=dtype, state_dtype=state_dtype)
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
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


def test_tokens_of_x_may_be_strided(make, match):
    inputs = prefill_inputs(make, (5, 2))
    inputs["x"] = make.normal(7, 20)[:, 3:9]
    match(causal_conv1d_prefill, reference.causal_conv1d_prefill, inputs, ["state"])


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
