"""rotary."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.rotary import reference, rotary

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def rotary_inputs(make, *, num_tokens=7, half=4, head_dim=8, dtype=F32, angle_dtype=F32):
    angles = 9 * make.normal(num_tokens, half)
    return {
        "x": make.normal(num_tokens, 3, head_dim, dtype=dtype),
        "cos": angles.cos().to(angle_dtype),
        "sin": angles.sin().to(angle_dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "angle_dtype"),
    [
        pytest.param(F32, F32, id="base"),
        pytest.param(BF16, F32, id="bf16"),
        pytest.param(BF16, BF16, id="bf16 angles"),
        pytest.param(F16, F32, id="fp16"),
        pytest.param(F64, F64, id="fp64"),
    ],
)
@pytest.mark.parametrize("half", [4, 3, 0])
def test_is_as_exact_as_plain_torch(make, match, half, dtype, angle_dtype):
    match(
        rotary,
        reference.rotary,
        rotary_inputs(make, half=half, dtype=dtype, angle_dtype=angle_dtype),
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("half", "head_dim"), [(1, 2), (7, 15), (8, 16), (9, 33), (16, 64), (17, 34), (32, 64)]
)
def test_takes_any_head_dim(make, match, half, head_dim, dtype):
    match(rotary, reference.rotary, rotary_inputs(make, half=half, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_takes_any_number_of_tokens(make, match, num_tokens):
    """The most are enough to be shared out among threads."""
    match(
        rotary,
        reference.rotary,
        rotary_inputs(make, num_tokens=num_tokens, half=20, head_dim=41, dtype=BF16),
    )


def test_angles_may_be_strided(make, match):
    inputs = rotary_inputs(make)
    for name in ("cos", "sin"):
        inputs[name] = make.normal(7, 11)[:, 3:7]
    match(rotary, reference.rotary, inputs)
    inputs["cos"], inputs["x"] = make.normal(4, 7).T, make.normal(8, 3, 7).permute(2, 1, 0)
    match(rotary, reference.rotary, inputs)


@pytest.mark.parametrize("op", [rotary, reference.rotary])
def test_equals_llama_bit_for_bit(make, op):
    inputs = rotary_inputs(make)
    x = inputs["x"].transpose(0, 1)[None]  # (1, H, T, D)
    cos, sin = (torch.cat([inputs[name]] * 2, dim=-1)[None] for name in ("cos", "sin"))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.equal(op(**inputs), expected[0].transpose(0, 1))


@pytest.mark.parametrize("op", [rotary, reference.rotary])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_precision_is_rounded_once(make, op, dtype):
    inputs = rotary_inputs(make, num_tokens=30, dtype=dtype)
    in_float32 = op(**(inputs | {"x": inputs["x"].float()}))
    assert torch.equal(op(**inputs), in_float32.to(dtype))


def test_dims_past_the_rotary_ones_pass_through(make):
    inputs = rotary_inputs(make, half=3, dtype=BF16)
    before = inputs["x"].clone()
    out = rotary(**inputs)
    assert torch.equal(out[..., 6:], before[..., 6:])
    assert not torch.equal(out[..., :6], before[..., :6])
    assert torch.equal(inputs["x"], before)


def test_x_may_be_strided(make, match):
    inputs = rotary_inputs(make)
    inputs["x"] = make.normal(7, 40)[:, 5:29].unflatten(1, (3, 8))
    assert rotary(**inputs).is_contiguous()
    match(rotary, reference.rotary, inputs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(7, 8)}, ShapeError, r"x: expected shape \(T, H, D\), got \(7, 8\)"),
        ({"cos": torch.ones(6, 4)}, ShapeError, r"cos: expected shape \(T=7, R2\), got \(6, 4"),
        ({"sin": torch.ones(7, 3)}, ShapeError, r"sin: .*\(T=7, R2=4\), got \(7, 3\)"),
        ({"sin": torch.ones(7, 4).int()}, DtypeError, r"sin: expected .* got torch.int32"),
        (
            {"cos": torch.ones(7, 5), "sin": torch.ones(7, 5)},
            ShapeError,
            r"cos: expected 2 \* R2 of at most D=8, got shape \(7, 5\)",
        ),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {"x": torch.ones(7, 2, 8), "cos": torch.ones(7, 4), "sin": torch.ones(7, 4)}
    rotary(**inputs)
    with pytest.raises(error, match=message):
        rotary(**(inputs | change))
