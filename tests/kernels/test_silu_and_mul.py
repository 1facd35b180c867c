"""silu_and_mul."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.silu_and_mul import reference, silu_and_mul

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("options", [{}, {"gate_multiplier": 0.37}], ids=["", "multiplier"])
def test_is_as_exact_as_plain_torch(make, match, num_tokens, dtype, options):
    inputs = {"x": 3 * make.normal(num_tokens, 66, dtype=dtype)} | options
    assert match(silu_and_mul, reference.silu_and_mul, inputs)["out"].dtype == dtype


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 300, 2047, 2048, 2049])
def test_takes_any_dim(make, match, dim, dtype):
    match(silu_and_mul, reference.silu_and_mul, {"x": make.normal(3, 2 * dim, dtype=dtype)})


def test_no_tokens_and_no_channels(make):
    assert silu_and_mul(make.normal(0, 6)).shape == (0, 3)
    assert silu_and_mul(make.normal(3, 0)).shape == (3, 0)


def test_many_tokens_on_several_threads(make, match):
    match(silu_and_mul, reference.silu_and_mul, {"x": make.normal(33, 5001 * 2, dtype=BF16)})


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tokens_may_be_apart(make, match, dtype):
    inputs = {"x": make.normal(7, 50, dtype=dtype)[:, 3:37]}
    match(silu_and_mul, reference.silu_and_mul, inputs)
    inputs = {"x": make.normal(34, 7, dtype=dtype).t()}
    match(silu_and_mul, reference.silu_and_mul, inputs)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_gates_far_from_zero(make, match, dtype):
    """Saturated gates, an infinite one, and NaN, which has to go on."""
    gates = [-6e4, -104.0, -88.8, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 104.0, 6e4]
    gates += [float("inf"), float("nan")]
    x = torch.tensor([gates, [1.5] * len(gates)], dtype=dtype, device=make.device).view(1, -1)
    out = match(silu_and_mul, reference.silu_and_mul, {"x": x})["out"]
    assert (out[0, :5] <= 0).all()


def test_equals_the_feed_forward_of_llama(make):
    config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1)
    mlp = LlamaMLP(config).to(make.device)
    x = make.normal(5, 8)
    both = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=1).detach()
    torch.testing.assert_close(mlp.down_proj(silu_and_mul(both)), mlp(x))


def test_the_multiplier_comes_before_the_silu(make):
    x = make.normal(4, 10, dtype=F64)
    scaled = torch.cat([2.5 * x[:, :5], x[:, 5:]], dim=1)
    torch.testing.assert_close(silu_and_mul(x, gate_multiplier=2.5), silu_and_mul(scaled))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(4), ShapeError, r"x: expected shape \(T, 2I\), got \(4,\)"),
        (torch.ones(2, 5), ShapeError, r"x: expected an even number of channels, got \(2, 5\)"),
        (torch.ones(2, 4).long(), DtypeError, r"x: .* got torch.int64"),
    ],
)
def test_refuses_bad_arguments(x, error, message):
    with pytest.raises(error, match=message):
        silu_and_mul(x)
