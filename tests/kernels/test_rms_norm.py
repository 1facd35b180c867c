"""rms_norm."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.rms_norm import reference, rms_norm

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


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
    inputs = {
        "x": make.normal(num_tokens, 33, dtype=dtype),
        "weight": make.normal(33, dtype=weight_dtype),
        "eps": 1e-5,
    }
    match(rms_norm, reference.rms_norm, inputs)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_llama_bit_for_bit(make, dtype, eps):
    norm = LlamaRMSNorm(32, eps=eps).to(make.device, dtype)
    norm.weight.data = make.normal(32, dtype=dtype)
    x = make.normal(9, 32, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight.data, eps=eps), norm(x))


@pytest.mark.parametrize("norm", [rms_norm, reference.rms_norm])
def test_root_mean_square_becomes_one(make, norm):
    y = norm(3 * make.normal(4, 50, dtype=F64), torch.ones(50).double().to(make.device), eps=0.0)
    torch.testing.assert_close(y.square().mean(dim=1), torch.ones_like(y[:, 0]))


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
