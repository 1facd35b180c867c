"""kv_write."""

import pytest
import torch

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.kv_write import kv_write, reference

BLOCK_SIZE = 4
CACHES = ["k_cache", "v_cache"]


def write_inputs(make, token_slots, *, dtype=torch.float32, cache_dtype=torch.float32):
    part = ((2, BLOCK_SIZE, 6), cache_dtype)
    k_cache, v_cache = make.units(5, part, part)
    num_tokens = len(token_slots)
    return {
        "k": make.normal(num_tokens, 2, 6, dtype=dtype),
        "v": make.normal(num_tokens, 2, 6, dtype=dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "token_slots": make.int64(*token_slots),
    }


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        pytest.param(torch.float32, torch.float32, id="base"),
        pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param(torch.float32, torch.bfloat16, id="bf16 cache"),
        pytest.param(torch.bfloat16, torch.float32, id="bf16 with fp32 cache"),
        pytest.param(torch.bfloat16, torch.float16, id="bf16 with fp16 cache"),
    ],
)
def test_equals_the_reference(make, run, dtype, cache_dtype):
    inputs = write_inputs(make, [4, 19, 6, 7, 8, 13, 0], dtype=dtype, cache_dtype=cache_dtype)
    ours = run(kv_write, inputs, CACHES)
    plain = run(reference.kv_write, inputs, CACHES)
    for name in CACHES:
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", [kv_write, reference.kv_write])
def test_a_token_lands_in_its_block_at_its_offset(make, run, write):
    inputs = write_inputs(make, [13])
    results = run(write, inputs, CACHES)
    for name, cache in (("k", results["k_cache"]), ("v", results["v_cache"])):
        assert torch.equal(cache[3, :, 1], inputs[name][0])
        cache[3, :, 1] = torch.nan
        assert cache.isnan().all()


@pytest.mark.parametrize("write", [kv_write, reference.kv_write])
def test_null_block_is_not_written(make, run, write):
    inputs = write_inputs(make, [0, 3, -1])
    results = run(write, inputs, CACHES)
    assert results["k_cache"].isnan().all()
    assert results["v_cache"].isnan().all()


def test_no_tokens(make, run):
    assert run(kv_write, write_inputs(make, []), CACHES)["k_cache"].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": torch.ones(1, 2, 5)}, ShapeError, r"v: expected .*, D=6\), got \(1, 2, 5\)"),
        (
            {"k_cache": torch.ones(5, 4, 2, 6)},
            ShapeError,
            r"k_cache: .*\(NB, KH=2, BS, D=6\), got \(5, 4",
        ),
        ({"v_cache": torch.ones(5, 2, 8, 6)}, ShapeError, r"v_cache: .*BS=4, D=6\), got \(5, 2, 8"),
        ({"v_cache": torch.ones(5, 2, 6, 4).mT}, ShapeError, r"v_cache: expected contiguous"),
        ({"token_slots": torch.ones(1).int()}, DtypeError, r"token_slots: expected torch.int64"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    inputs = {
        "k": torch.ones(1, 2, 6),
        "v": torch.ones(1, 2, 6),
        "k_cache": torch.ones(5, 2, 4, 6),
        "v_cache": torch.ones(5, 2, 4, 6),
        "token_slots": torch.tensor([4]),
    }
    kv_write(**inputs)
    with pytest.raises(error, match=message):
        kv_write(**(inputs | change))
