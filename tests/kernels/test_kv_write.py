"""kv_write."""

import mmap

import pytest
import torch

from plait.kernels.errors import DtypeError, ShapeError
from plait.kernels.kv_write import kv_write, reference

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BLOCK_SIZE = 4
CACHES = ["k_cache", "v_cache"]


def write_inputs(
    make, token_slots, *, dtype=F32, cache_dtype=F32, block_size=BLOCK_SIZE, head_dim=6
):
    part = ((2, block_size, head_dim), cache_dtype)
    k_cache, v_cache = make.units(max([0, *token_slots]) // block_size + 2, part, part)
    num_tokens = len(token_slots)
    return {
        "k": make.normal(num_tokens, 2, head_dim, dtype=dtype),
        "v": make.normal(num_tokens, 2, head_dim, dtype=dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "token_slots": make.int64(*token_slots),
    }


def check(run, inputs):
    ours = run(kv_write, inputs, CACHES)
    plain = run(reference.kv_write, inputs, CACHES)
    for name in CACHES:
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=0, equal_nan=True)


SLOTS = [4, 19, 6, 7, 8, 13, 0]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("cache_dtype", [F32, BF16, F16, F64])
def test_equals_the_reference(make, run, dtype, cache_dtype):
    check(run, write_inputs(make, SLOTS, dtype=dtype, cache_dtype=cache_dtype))


@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_takes_any_block_size(make, run, block_size):
    slots = [block_size, 2 * block_size - 1, 0, 305, block_size - 1, 3 * block_size, 304]
    check(run, write_inputs(make, slots, block_size=block_size))


@pytest.mark.parametrize("head_dim", [1, 4, 7, 8, 9, 16, 17, 33])
def test_takes_any_head_dim(make, run, head_dim):
    check(run, write_inputs(make, SLOTS, dtype=BF16, head_dim=head_dim))


def test_caches_may_differ_in_dtype_and_stride(make, run):
    inputs = write_inputs(make, SLOTS, dtype=BF16)
    (inputs["v_cache"],) = make.units(6, ((2, BLOCK_SIZE, 6), F16))
    inputs["k"] = inputs["k"].float()
    check(run, inputs)


def test_keys_and_values_may_be_strided(make, run):
    inputs = write_inputs(make, SLOTS)
    qkv = make.normal(len(SLOTS), 40)
    inputs["k"] = qkv[:, 5:17].unflatten(1, (2, 6))
    inputs["v"] = qkv[:, 20:40].view(-1, 2, 10)[:, :, 3:9]
    check(run, inputs)
    inputs["k"] = make.normal(6, 2, len(SLOTS)).permute(2, 1, 0)
    check(run, inputs)


def test_many_tokens(make, run):
    """Enough to be shared out among threads."""
    check(run, write_inputs(make, range(4, 604), dtype=BF16, head_dim=33))


def test_slots_beyond_4_gib(make):
    """The caches lie in a sparse mapping: only what is written takes memory."""
    if make.device.type != "cpu":
        pytest.skip("sparse mappings are memory of the host")
    unit_bytes, num_units = 1 << 20, 1 << 13
    buffer = torch.frombuffer(mmap.mmap(-1, num_units * unit_bytes), dtype=torch.uint8)
    units = buffer.view(num_units, unit_bytes)
    part = 2 * BLOCK_SIZE * 6 * 4
    k_cache, v_cache = (
        units[:, first : first + part].view(F32).unflatten(1, (2, BLOCK_SIZE, 6))
        for first in (0, part)
    )
    inputs = write_inputs(make, [5]) | {"k_cache": k_cache, "v_cache": v_cache}
    for block in (num_units // 2 + 1, num_units - 1):
        inputs["token_slots"] = make.int64(block * BLOCK_SIZE + 2)
        kv_write(**inputs)
        assert torch.equal(k_cache[block, :, 2], inputs["k"][0])
        assert torch.equal(v_cache[block, :, 2], inputs["v"][0])


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
