"""linear."""

import pytest
import torch

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.linear import linear, pack_weight, reference
from plait.kernels.linear.packed import quantize_int8

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def product(x, weight, bias=None, scale=None, out_dtype=None):
    return linear(x, pack_weight(weight, bias=bias, scale=scale), out_dtype=out_dtype)


def plain(x, weight, bias=None, scale=None, out_dtype=None):
    packed = reference.pack_weight(weight, bias=bias, scale=scale)
    wide = out_dtype is not None and x.dtype != F64
    return reference.linear(x, packed, out_dtype=out_dtype if wide else x.dtype)


def inputs(make, tokens, outputs, features, dtype=F32, **options):
    x = make.normal(tokens, features, dtype=dtype)
    return {"x": x, "weight": make.normal(outputs, features, dtype=dtype), **options}


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize(
    ("tokens", "outputs", "features"),
    [(1, 1, 1), (2, 5, 3), (3, 17, 64), (5, 33, 65), (8, 64, 31), (13, 130, 40)],
)
def test_is_as_exact_as_plain_torch(make, match, dtype, tokens, outputs, features):
    match(product, plain, inputs(make, tokens, outputs, features, dtype))


def assert_exact(out, x, weight, backend):
    """`out` is the float32 product; what torch rounded to bfloat16 on the way is granted."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    granted = 2.0**-8 * exact.abs() if backend == "torch" else 0
    assert ((out - exact).abs() <= granted + 1e-6 * magnitude).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 11, 95, 96, 97, 300])
def test_any_number_of_tokens(make, tokens, backend):
    x, weight = inputs(make, tokens, 20, 50, BF16).values()
    assert_exact(product(x, weight, out_dtype=F32), x, weight, backend)


def test_no_token(make):
    assert product(*inputs(make, 0, 20, 50, BF16).values()).shape == (0, 20)


def test_more_inputs_than_a_block_of_rows_holds(make, backend):
    x, weight = inputs(make, 7, 9, 40000, BF16).values()
    assert_exact(product(x, weight, out_dtype=F32), x, weight, backend)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("names", [("bias",), ("scale",), ("bias", "scale")])
def test_scale_and_bias(make, match, run, dtype, names):
    base = inputs(make, 4, 21, 16, dtype)
    options = {name: make.normal(21, dtype=dtype) for name in names}
    out = match(product, plain, base | options)["out"]
    assert not torch.allclose(out, run(product, base, [])["out"])


def test_rows_of_a_wider_matrix(make):
    wide = make.normal(6, 80, dtype=BF16)
    packed = pack_weight(make.normal(9, 30, dtype=BF16))
    assert torch.equal(linear(wide[:, 7:37], packed), linear(wide[:, 7:37].contiguous(), packed))
    columns = make.normal(30, 6, dtype=BF16).t()
    assert torch.equal(linear(columns, packed), linear(columns.contiguous(), packed))


class TestNative:
    @pytest.fixture
    def backend(self, native_backend):
        return native_backend

    def test_float32_output_is_not_rounded(self, make, match):
        out = match(product, plain, inputs(make, 3, 21, 16, BF16, out_dtype=F32))["out"]
        assert out.dtype == F32
        assert not torch.equal(out, out.bfloat16().float())

    def test_a_token_does_not_depend_on_its_batch(self, make):
        x, weight = inputs(make, 40, 33, 100, BF16).values()
        packed = pack_weight(weight)
        whole = linear(x, packed, out_dtype=F32)
        assert torch.equal(whole[3:5], linear(x[3:5], packed, out_dtype=F32))
        assert torch.equal(
            whole[3:20], torch.cat([linear(r, packed, out_dtype=F32) for r in (x[3:9], x[9:20])])
        )


class TestInt8:
    @pytest.mark.parametrize("dtype", [F32, BF16, F16])
    @pytest.mark.parametrize(
        ("tokens", "outputs", "features"), [(1, 1, 1), (3, 40, 33), (9, 17, 256), (100, 5, 2000)]
    )
    def test_equals_the_product_with_the_rounded_weight(
        self, make, dtype, tokens, outputs, features, backend
    ):
        x, weight = inputs(make, tokens, outputs, features, dtype).values()
        packed = pack_weight(weight, quantization="int8")
        out = linear(x, packed, out_dtype=F32).double()
        integers, scale = quantize_int8(weight)
        rounded = integers.double() * scale.double()[:, None]
        # A row of x loses at most 2^-13 of its largest element (bfloat16: 2^-9 of each).
        loss = x.double().abs().amax(1, keepdim=True) * 2.0**-13 * rounded.abs().sum(1)
        exact = x.double() @ rounded.T
        granted = 2.0**-7 * exact.abs() if backend == "torch" else 0
        error = (out - exact).abs()
        assert (error <= loss + granted + 1e-5 * (x.double().abs() @ rounded.abs().T)).all()

    def test_weight_loses_half_a_step_at_most(self, make):
        weight = make.normal(30, 50)
        integers, scale = quantize_int8(weight)
        assert integers.abs().amax(1).eq(127).all()
        assert ((integers * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all()

    def test_scale_and_bias(self, make):
        x, weight = inputs(make, 4, 21, 16, BF16).values()
        scale, bias = make.normal(21), make.normal(21)
        plain = linear(x, pack_weight(weight, quantization="int8"), out_dtype=F32)
        packed = pack_weight(weight, scale=scale, bias=bias, quantization="int8")
        out = linear(x, packed, out_dtype=F32)
        torch.testing.assert_close(out, plain * scale + bias, rtol=1e-5, atol=1e-5)

    def test_rows_of_zeros(self, make):
        packed = pack_weight(torch.zeros(3, 8, dtype=BF16), quantization="int8")
        assert linear(make.normal(2, 8, dtype=BF16), packed).eq(0).all()
        packed = pack_weight(make.normal(3, 8, dtype=BF16), quantization="int8")
        assert linear(torch.zeros(2, 8, dtype=BF16), packed).eq(0).all()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_stays_so_in_its_row(self, make, bad):
        x, weight = inputs(make, 3, 9, 20, BF16).values()
        x[1, 13] = bad
        finite = linear(x, pack_weight(weight, quantization="int8")).isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1].any()

    def test_the_largest_inputs_do_not_overflow(self, make, backend):
        x = torch.full((2, 70000), 3.0, dtype=BF16)
        out = linear(x, pack_weight(torch.ones(2, 70000, dtype=BF16), quantization="int8"))
        torch.testing.assert_close(out.float(), torch.full((2, 2), 210000.0), rtol=0.01, atol=0)

    def test_takes_half_the_memory(self, make):
        weight = make.normal(64, 1024, dtype=BF16)
        assert pack_weight(weight, quantization="int8").nbytes == 64 * 1024 + 4 * 64
        assert pack_weight(weight).nbytes == 2 * 64 * 1024


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_weights_are_not_changed(make, quantization, dtype):
    weight = make.normal(5, 7, dtype=dtype)
    before = weight.clone()
    linear(make.normal(2, 7, dtype=dtype), pack_weight(weight, quantization=quantization))
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 5)}, ShapeError, r"x: expected shape \(T, K=4\), got \(2, 5\)"),
        ({"x": torch.ones(2, 4).bfloat16()}, DtypeError, r"x: expected torch.float32, got torch.b"),
        ({"bias": torch.ones(4)}, ShapeError, r"bias: expected shape \(O=3\), got \(4,\)"),
        ({"scale": torch.ones(4)}, ShapeError, r"scale: expected shape \(O=3\), got \(4,\)"),
        ({"weight": torch.ones(3)}, ShapeError, r"weight: expected shape \(O, K\), got \(3,\)"),
        ({"weight": torch.ones(3, 4).long()}, DtypeError, r"weight: .* got torch.int64"),
        ({"out_dtype": F16}, DtypeError, r"out_dtype: expected torch.float32 or torch.float32"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(3, 4)}
    product(**arguments)
    with pytest.raises(error, match=message):
        product(**(arguments | change))


def test_refuses_an_unknown_quantization():
    with pytest.raises(KernelError, match="quantization: expected 'int8' or None, got 'int4'"):
        pack_weight(torch.ones(3, 4), quantization="int4")
