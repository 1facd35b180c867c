"""moe."""

import pytest
import torch
import torch.nn.functional as F

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.moe import moe as packed_moe
from plait.kernels.moe import pack_experts, reference

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
EXPERTS, DIM, WIDTH = 5, 12, 9


def moe(x, w_in, w_out, quantization=None, **routing):
    return packed_moe(x, pack_experts(w_in, w_out, quantization=quantization), **routing)


def plain(x, w_in, w_out, **routing):
    return reference.moe(x, reference.pack_experts(w_in, w_out), **routing)


def moe_inputs(make, num_tokens, *, num_chosen=2, dtype=F32, weights_dtype=F32):
    order = make.normal(num_tokens, EXPERTS).argsort(dim=1)
    return {
        "x": make.normal(num_tokens, DIM, dtype=dtype),
        "w_in": make.normal(EXPERTS, 2 * WIDTH, DIM, dtype=dtype),
        "w_out": make.normal(EXPERTS, DIM, WIDTH, dtype=dtype),
        "expert_ids": order[:, :num_chosen],
        "expert_weights": make.normal(num_tokens, num_chosen, dtype=weights_dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [
        pytest.param(F32, F32, id="base"),
        pytest.param(BF16, BF16, id="bf16"),
        pytest.param(BF16, F32, id="bf16 with fp32 weights"),
        pytest.param(F16, F32, id="fp16 with fp32 weights"),
        pytest.param(F64, F64, id="fp64"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_is_as_exact_as_plain_torch(make, match, num_tokens, dtype, weights_dtype):
    inputs = moe_inputs(make, num_tokens, dtype=dtype, weights_dtype=weights_dtype)
    match(moe, plain, inputs)


@pytest.mark.parametrize("num_chosen", [1, 5])
def test_any_number_of_experts(make, match, num_chosen):
    match(moe, plain, moe_inputs(make, 7, num_chosen=num_chosen))


@pytest.mark.parametrize("op", [moe, plain])
def test_equals_the_dense_formula(make, op):
    inputs = moe_inputs(make, 7, dtype=F64, weights_dtype=F64)
    projected = torch.einsum("td,eid->tei", inputs["x"], inputs["w_in"])
    hidden = F.silu(projected[..., :WIDTH]) * projected[..., WIDTH:]
    outs = torch.einsum("tei,edi->ted", hidden, inputs["w_out"])
    weights = torch.zeros(7, EXPERTS, dtype=F64, device=make.device)
    weights.scatter_(1, inputs["expert_ids"], inputs["expert_weights"])
    torch.testing.assert_close(op(**inputs), (weights[..., None] * outs).sum(dim=1))


def test_experts_that_are_not_hit_are_not_read(make):
    inputs = moe_inputs(make, 7)
    inputs["expert_ids"] = make.int64(*[1, 3] * 7).view(7, 2)
    for expert in (0, 2, 4):
        inputs["w_in"][expert] = torch.nan
        inputs["w_out"][expert] = torch.nan
    assert moe(**inputs).isfinite().all()


def test_one_expert_may_be_chosen_twice(make, match):
    inputs = moe_inputs(make, 3)
    inputs["expert_ids"] = make.int64(2, 2, 0, 2, 1, 1).view(3, 2)
    match(moe, plain, inputs)


@pytest.mark.parametrize("op", [moe, plain])
def test_the_sum_over_experts_is_kept_in_float32(make, op):
    """256 + 1 + 1 + 1 + 1 would stay 256 in bf16."""
    inputs = moe_inputs(make, 3, dtype=BF16)
    for name in ("w_in", "w_out"):
        inputs[name] = inputs[name][:1].expand(EXPERTS, -1, -1)
    inputs["expert_ids"] = make.int64(*[0, 1, 2, 3, 4] * 3).view(3, 5)
    weights = torch.tensor([[256.0, 1.0, 1.0, 1.0, 1.0]] * 3, device=make.device)
    first = {"expert_ids": inputs["expert_ids"][:, :1], "expert_weights": weights[:, 1:2]}
    one = op(**(inputs | first))
    out = op(**(inputs | {"expert_weights": weights}))
    torch.testing.assert_close(out.float(), 260 * one.float(), rtol=2**-7, atol=0)


def test_int8_weights(make, match):
    inputs = moe_inputs(make, 33, dtype=BF16)
    rounded = reference.pack_experts(inputs["w_in"], inputs["w_out"], quantization="int8")
    experts = [reference.expert(rounded, index) for index in range(EXPERTS)]
    w_in, w_out = (torch.stack(weights) for weights in zip(*experts, strict=True))
    exact = plain(
        inputs["x"], w_in, w_out, **{n: inputs[n] for n in ("expert_ids", "expert_weights")}
    )
    out = moe(**inputs, quantization="int8")
    scale = exact.float().abs().max()
    assert (out.float() - exact.float()).abs().max() < 0.02 * scale
    assert not torch.equal(out, moe(**inputs))


def test_no_tokens(make):
    assert moe(**moe_inputs(make, 0)).shape == (0, DIM)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w_in": torch.ones(5, 9, 12)}, ShapeError, r"w_in: .*\(E=5, 2I=18, D=12\), got \(5, 9"),
        ({"w_in": torch.ones(5, 18, 12).half()}, DtypeError, r"w_in: expected torch.float32, got"),
        (
            {"x": torch.ones(3, 12).half()},
            DtypeError,
            r"x: expected torch.float32, got torch.float",
        ),
        ({"expert_ids": torch.ones(3, 2).int()}, DtypeError, r"expert_ids: expected torch.int64,"),
        ({"expert_weights": torch.ones(3, 1)}, ShapeError, r"expert_weights: .*K=2\), got \(3, 1"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "x": torch.ones(3, 12),
        "w_in": torch.ones(5, 18, 12),
        "w_out": torch.ones(5, 12, 9),
        "expert_ids": torch.ones(3, 2, dtype=torch.int64),
        "expert_weights": torch.ones(3, 2),
    }
    moe(**inputs)
    with pytest.raises(error, match=message):
        moe(**(inputs | change))
