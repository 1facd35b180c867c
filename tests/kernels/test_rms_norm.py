"""rms_norm and add_rms_norm."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.rms_norm import add_rms_norm, reference, rms_norm

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# One, below, at and above a vector of any instruction set, and the unrolled 64 with rests.
DIMS = [1, 3, 4, 7, 8, 15, 16, 17, 31, 63, 64, 65, 300]


def norm_inputs(make, num_tokens, dim, *, dtype=F32, weight_dtype=None):
    return {
        "x": make.normal(num_tokens, dim, dtype=dtype),
        "weight": make.normal(dim, dtype=weight_dtype or dtype),
        "eps": 1e-5,
    }


def add_inputs(make, num_tokens, dim, *, dtype=F32, residual_dtype=F32, weight_dtype=None):
    return {
        "branch": make.normal(num_tokens, dim, dtype=dtype),
        "residual": make.normal(num_tokens, dim, dtype=residual_dtype),
        "weight": make.normal(dim, dtype=weight_dtype or dtype),
        "eps": 1e-5,
    }


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        pytest.param(F32, F32, id="base"),
        pytest.param(BF16, BF16, id="bf16"),
        pytest.param(BF16, F32, id="bf16 with fp32 weight"),
        pytest.param(F16, F16, id="fp16"),
        pytest.param(F64, F64, id="fp64"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_is_as_exact_as_plain_torch(make, match, num_tokens, dtype, weight_dtype):
    inputs = norm_inputs(make, num_tokens, 33, dtype=dtype, weight_dtype=weight_dtype)
    match(rms_norm, reference.rms_norm, inputs)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", DIMS)
def test_takes_any_dim(make, match, dim, dtype):
    match(rms_norm, reference.rms_norm, norm_inputs(make, 3, dim, dtype=dtype))


def test_no_tokens(make):
    assert rms_norm(**norm_inputs(make, 0, 5)).shape == (0, 5)


def test_many_tokens_on_several_threads(make, match):
    match(rms_norm, reference.rms_norm, norm_inputs(make, 67, 1001, dtype=BF16))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_of_x_may_be_apart(make, match, dtype):
    inputs = norm_inputs(make, 7, 33, dtype=dtype)
    inputs["x"] = make.normal(7, 50, dtype=dtype)[:, 5:38]
    match(rms_norm, reference.rms_norm, inputs)
    inputs["x"] = make.normal(33, 7, dtype=dtype).t()
    match(rms_norm, reference.rms_norm, inputs)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_token_only(make, match, dtype, bad):
    inputs = norm_inputs(make, 3, 33, dtype=dtype)
    inputs["x"][1, 20] = bad
    match(rms_norm, reference.rms_norm, inputs)
    inputs["x"].view(torch.int16 if dtype != F32 else torch.int32)[1, 20] = -1
    match(rms_norm, reference.rms_norm, inputs)


def test_every_value_of_a_token_keeps_the_dtype_in_range(make, match):
    inputs = norm_inputs(make, 4, 33)
    inputs["x"] *= make.uniform(4, 1, low=1e-12, high=1e-9)
    match(rms_norm, reference.rms_norm, inputs)
    inputs["x"] *= 1e20
    match(rms_norm, reference.rms_norm, inputs)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_llama(make, backend, dtype, eps):
    norm = LlamaRMSNorm(32, eps=eps).to(make.device, dtype)
    norm.weight.data = make.normal(32, dtype=dtype)
    x = make.normal(9, 32, dtype=dtype)
    out, expected = rms_norm(x, norm.weight.data, eps=eps), norm(x)
    if backend == "torch":
        assert torch.equal(out, expected)
    else:  # the sum is in another order: what is rounded twice may once round the other way
        torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert dtype == F32 or (out == expected).double().mean() > 0.98


@pytest.mark.parametrize("norm", [rms_norm, reference.rms_norm])
def test_root_mean_square_becomes_one(make, norm):
    y = norm(3 * make.normal(4, 50, dtype=F64), torch.ones(50).double().to(make.device), eps=0.0)
    torch.testing.assert_close(y.square().mean(dim=1), torch.ones_like(y[:, 0]))


ADD_DTYPES = [
    pytest.param(F32, F32, F32, id="base"),
    pytest.param(BF16, BF16, BF16, id="bf16"),
    pytest.param(BF16, F32, BF16, id="bf16 with fp32 residual"),
    pytest.param(BF16, F32, F32, id="bf16 with fp32 residual and weight"),
    pytest.param(BF16, BF16, F32, id="bf16 with fp32 weight"),
    pytest.param(F16, F16, F16, id="fp16"),
    pytest.param(F16, F32, F16, id="fp16 with fp32 residual"),
    pytest.param(F16, F16, F32, id="fp16 with fp32 weight"),
    pytest.param(F32, BF16, F32, id="fp32 with bf16 residual"),
    pytest.param(F64, F64, F64, id="fp64"),
]


@pytest.mark.parametrize(("dtype", "residual_dtype", "weight_dtype"), ADD_DTYPES)
@pytest.mark.parametrize("options", [{}, {"scale": 0.22}], ids=["", "scale"])
def test_add_is_as_exact_as_plain_torch(make, match, dtype, residual_dtype, weight_dtype, options):
    dtypes = {"dtype": dtype, "residual_dtype": residual_dtype, "weight_dtype": weight_dtype}
    inputs = add_inputs(make, 7, 133, **dtypes) | options
    results = match(add_rms_norm, reference.add_rms_norm, inputs, ["residual"])
    assert results["out"].dtype == dtype


@pytest.mark.parametrize(("dtype", "residual_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize("dim", DIMS)
def test_add_takes_any_dim(make, match, dim, dtype, residual_dtype):
    inputs = add_inputs(make, 3, dim, dtype=dtype, residual_dtype=residual_dtype)
    match(add_rms_norm, reference.add_rms_norm, inputs, ["residual"])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_add_takes_rows_that_are_apart(make, match, dtype):
    inputs = add_inputs(make, 7, 33, dtype=dtype)
    inputs["branch"] = make.normal(7, 50, dtype=dtype)[:, 5:38]
    inputs["residual"] = make.normal(7, 60)[:, 20:53]
    results = match(add_rms_norm, reference.add_rms_norm, inputs, ["residual"])
    whole = torch.empty(0).set_(results["residual"].untyped_storage()).view(7, 60)
    before = inputs["residual"]._base
    assert torch.equal(whole[:, :20], before[:, :20])
    assert torch.equal(whole[:, 53:], before[:, 53:])
    inputs["branch"] = make.normal(33, 7, dtype=dtype).t()
    inputs["residual"] = make.normal(33, 7).t()
    match(add_rms_norm, reference.add_rms_norm, inputs, ["residual"])


def test_add_is_addition_then_rms_norm(make):
    inputs = add_inputs(make, 67, 1001, dtype=BF16)
    total = inputs["residual"] + inputs["branch"].float()
    out = add_rms_norm(**inputs)
    assert torch.equal(inputs["residual"], total)
    assert torch.equal(out, rms_norm(total.bfloat16(), inputs["weight"], eps=inputs["eps"]))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7F800001, 0x7F800000])
def test_what_is_not_finite_in_the_residual_goes_on(make, match, dtype, bits):
    """NaN of any bits and infinity."""
    inputs = add_inputs(make, 3, 33, dtype=dtype)
    inputs["residual"].view(torch.int32)[1, 20] = bits
    match(add_rms_norm, reference.add_rms_norm, inputs, ["residual"])


def test_add_no_tokens(make):
    assert add_rms_norm(**add_inputs(make, 0, 5)).shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "weight", "error", "message"),
    [
        (torch.ones(4), torch.ones(4), ShapeError, r"x: expected shape \(T, D\), got \(4,\)"),
        (torch.ones(2, 4), torch.ones(3), ShapeError, r"weight: .*\(D=4\), got \(3,\)"),
        (torch.ones(2, 4).long(), torch.ones(4), DtypeError, r"x: .* got torch.int64"),
    ],
)
def test_refuses_bad_arguments(x, weight, error, message):
    with pytest.raises(error, match=message):
        rms_norm(x, weight, eps=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"branch": torch.ones(4)}, ShapeError, r"branch: expected shape \(T, D\), got \(4,\)"),
        ({"residual": torch.ones(2, 3)}, ShapeError, r"residual: .*\(T=2, D=4\), got \(2, 3\)"),
        ({"residual": torch.ones(2, 4).int()}, DtypeError, r"residual: .* got torch.int32"),
        ({"weight": torch.ones(3)}, ShapeError, r"weight: .*\(D=4\), got \(3,\)"),
    ],
)
def test_add_refuses_bad_arguments(change, error, message):
    inputs = {"branch": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4)}
    add_rms_norm(**inputs, eps=1e-5)
    with pytest.raises(error, match=message):
        add_rms_norm(**(inputs | change), eps=1e-5)
