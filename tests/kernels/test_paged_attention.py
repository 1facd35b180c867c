"""paged_attention_prefill and paged_attention_decode."""

import pytest
import torch
import torch.nn.functional as F

from plait.kernels.errors import DtypeError, KernelError, ShapeError
from plait.kernels.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    reference,
    torch_impl,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BLOCK_SIZE = 16
HEAD_DIM = 8


def cache_inputs(make, seq_lens, *, kv_heads, cache_dtype):
    """Caches that are NaN but for the positions below `seq_lens`, blocks in shuffled order."""
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    part = ((kv_heads, BLOCK_SIZE, HEAD_DIM), cache_dtype)
    k_cache, v_cache = make.units(sum(counts) + 2, part, part)
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    tables = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int64)
    for row, length in enumerate(seq_lens):
        for column in range(counts[row]):
            block = free.pop()
            tables[row, column] = block
            used = min(BLOCK_SIZE, length - column * BLOCK_SIZE)
            k_cache[block, :, :used] = make.normal(kv_heads, used, HEAD_DIM, dtype=cache_dtype)
            v_cache[block, :, :used] = make.normal(kv_heads, used, HEAD_DIM, dtype=cache_dtype)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables.to(make.device),
        "scale": HEAD_DIM**-0.5,
    }


def prefill_inputs(make, lengths, contexts, *, heads=4, kv_heads=2, dtype=F32, cache_dtype=F32):
    seq_lens = [length + context for length, context in zip(lengths, contexts, strict=True)]
    return cache_inputs(make, seq_lens, kv_heads=kv_heads, cache_dtype=cache_dtype) | {
        "q": make.normal(sum(lengths), heads, HEAD_DIM, dtype=dtype),
        "cu_seqlens": make.packed_rows(lengths)["cu_seqlens"],
        "context_lens": make.int32(*contexts),
    }


def decode_inputs(make, seq_lens, *, heads=4, kv_heads=2, dtype=F32, cache_dtype=F32):
    return cache_inputs(make, seq_lens, kv_heads=kv_heads, cache_dtype=cache_dtype) | {
        "q": make.normal(len(seq_lens), heads, HEAD_DIM, dtype=dtype),
        "seq_lens": make.int32(*seq_lens),
    }


def check_prefill(match, inputs):
    return match(paged_attention_prefill, reference.paged_attention_prefill, inputs)["out"]


def check_decode(match, inputs):
    return match(paged_attention_decode, reference.paged_attention_decode, inputs)["out"]


DTYPES = [
    pytest.param(F32, F32, id="base"),
    pytest.param(BF16, BF16, id="bf16"),
    pytest.param(BF16, F32, id="bf16 with fp32 cache"),
    pytest.param(F32, BF16, id="fp32 with bf16 cache"),
    pytest.param(BF16, F16, id="bf16 with fp16 cache"),
    pytest.param(F64, F64, id="fp64"),
]
HEADS = [
    pytest.param(4, 4, id="MHA"),
    pytest.param(6, 2, id="GQA"),
    pytest.param(4, 1, id="MQA"),
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_prefill_is_as_exact_as_plain_torch(make, match, dtype, cache_dtype):
    inputs = prefill_inputs(
        make, (5, 1, 0, 17, 33), (0, 20, 3, 15, 16), dtype=dtype, cache_dtype=cache_dtype
    )
    check_prefill(match, inputs)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
def test_decode_is_as_exact_as_plain_torch(make, match, dtype, cache_dtype):
    check_decode(
        match, decode_inputs(make, (5, 1, 17, 33, 30), dtype=dtype, cache_dtype=cache_dtype)
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17])
def test_prefill_takes_any_length_and_context(make, match, length, context):
    check_prefill(match, prefill_inputs(make, (length,), (context,)))


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 300])
def test_decode_takes_any_length(make, match, seq_len):
    check_decode(match, decode_inputs(make, (seq_len,)))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_share_kv_heads(make, match, heads, kv_heads):
    check_prefill(match, prefill_inputs(make, (9,), (10,), heads=heads, kv_heads=kv_heads))
    check_decode(match, decode_inputs(make, (19, 3), heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("kv_of_head", [(0, 0, 1), (1, 0, 1, 1)])
def test_kv_of_head_may_be_irregular(make, match, run, kv_of_head):
    mapped = {"kv_of_head": make.int64(*kv_of_head)}
    for inputs, op, check in (
        (
            prefill_inputs(make, (9, 2), (10, 0), heads=len(kv_of_head)),
            paged_attention_prefill,
            check_prefill,
        ),
        (
            decode_inputs(make, (19, 3), heads=len(kv_of_head)),
            paged_attention_decode,
            check_decode,
        ),
    ):
        out = check(match, inputs | mapped)
        one_each = {name: inputs[name][:, list(kv_of_head)] for name in ("k_cache", "v_cache")}
        torch.testing.assert_close(out, run(op, inputs | one_each, ())["out"])


@pytest.mark.parametrize("window", [1, 5, 15, 16, 17, 1000])
def test_window(make, match, window):
    inputs = prefill_inputs(make, (40, 3, 1), (0, 37, 16)) | {"window": window}
    check_prefill(match, inputs)
    inputs = decode_inputs(make, (50, 3, 33, 17)) | {"window": window}
    check_decode(match, inputs)


def test_window_at_the_end_of_a_full_table(make, match):
    """The row that spans fewer blocks is padded past the last column of the table."""
    inputs = decode_inputs(make, (33, 64)) | {"window": 18}
    inputs["block_tables"] = inputs["block_tables"][:, :4]
    check_decode(match, inputs)


def test_window_of_one_returns_the_own_value(make):
    inputs = decode_inputs(make, (21,), heads=2) | {"window": 1}
    block = inputs["block_tables"][0, 1]
    expected = inputs["v_cache"][block, :, 4]
    torch.testing.assert_close(paged_attention_decode(**inputs)[0], expected)


@pytest.mark.parametrize("window", [None, 5, 300])
def test_long_prefill_is_tiled(make, match, window, monkeypatch):
    monkeypatch.setattr(torch_impl, "_QUERY_TILE", 8)
    check_prefill(match, prefill_inputs(make, (35, 8), (3, 20)) | {"window": window})


@pytest.mark.parametrize("gathered", [0, 40, 70])
def test_decode_batches_are_bounded(make, match, monkeypatch, gathered):
    monkeypatch.setattr(torch_impl, "_MAX_GATHERED", gathered * 2 * HEAD_DIM)
    check_decode(match, decode_inputs(make, (5, 30, 31, 1, 33, 17)))


def test_batches_hold_every_live_row_once_and_pad_at_most_twofold():
    seen = [7, 0, 100, 60, 49, 1, 0, 99]
    batches = list(torch_impl._batches(seen, 250))
    assert batches == [[2, 7], [3, 4], [0], [5]]


def test_prefill_equals_dense_attention(make):
    inputs = prefill_inputs(make, (21,), (12,), heads=4, kv_heads=2, dtype=F64, cache_dtype=F64)
    blocks = inputs["block_tables"][0, :3]
    k, v = (
        inputs[name][blocks].transpose(0, 1).flatten(1, 2)[:, :33].repeat_interleave(2, dim=0)
        for name in ("k_cache", "v_cache")
    )
    visible = torch.ones(21, 33, dtype=torch.bool, device=make.device).tril(diagonal=12)
    q = inputs["q"].transpose(0, 1)
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)
    torch.testing.assert_close(paged_attention_prefill(**inputs), expected[0].transpose(0, 1))


@pytest.mark.parametrize("window", [None, 6])
def test_decode_equals_prefill(make, window):
    inputs = prefill_inputs(make, (9,), (12,), dtype=F64, cache_dtype=F64) | {"window": window}
    expected = paged_attention_prefill(**inputs)
    q, context = inputs.pop("q"), inputs.pop("context_lens")
    del inputs["cu_seqlens"]
    inputs["block_tables"] = inputs["block_tables"].expand(9, -1)
    seq_lens = context + make.int32(*range(1, 10))
    decoded = paged_attention_decode(q, **inputs, seq_lens=seq_lens)
    torch.testing.assert_close(decoded, expected)


@pytest.mark.parametrize("cut", [1, 7, 8, 19])
def test_prefill_in_two_chunks_equals_one(make, cut):
    inputs = prefill_inputs(make, (20,), (12,), dtype=F64, cache_dtype=F64)
    expected = paged_attention_prefill(**inputs)
    q, context = inputs.pop("q"), inputs.pop("context_lens")
    del inputs["cu_seqlens"]
    for tokens, before in ((slice(0, cut), 0), (slice(cut, 20), cut)):
        out = paged_attention_prefill(
            q[tokens],
            **inputs,
            cu_seqlens=make.int32(0, len(q[tokens])),
            context_lens=context + before,
        )
        torch.testing.assert_close(out, expected[tokens])


@pytest.mark.parametrize("op", [paged_attention_prefill, reference.paged_attention_prefill])
def test_null_row_of_a_prefill_is_zeros(make, op):
    inputs = prefill_inputs(make, (4, 9, 3), (16, 10, 0))
    expected = op(**inputs)
    expected[4:13] = 0
    inputs["block_tables"][1] = 0
    inputs["q"][4:13] = torch.nan
    torch.testing.assert_close(op(**inputs), expected)


@pytest.mark.parametrize("op", [paged_attention_decode, reference.paged_attention_decode])
def test_null_row_of_a_decode_is_zeros(make, op):
    inputs = decode_inputs(make, (20, 10, 0, 3))
    expected = op(**inputs)
    assert (expected[2] == 0).all()
    expected[1] = 0
    inputs["seq_lens"][1] = 0
    inputs["block_tables"][1:3] = 0
    inputs["q"][1:3] = torch.nan
    torch.testing.assert_close(op(**inputs), expected)
    inputs["seq_lens"].zero_()
    assert (op(**inputs) == 0).all()


@pytest.mark.parametrize("op", [paged_attention_prefill, reference.paged_attention_prefill])
def test_tokens_past_the_last_row_are_zeros(make, op):
    inputs = prefill_inputs(make, (4, 9), (16, 10))
    inputs["cu_seqlens"][2] = 8
    inputs["q"][8:] = torch.nan
    out = op(**inputs)
    assert (out[8:] == 0).all()
    assert out[:8].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 9)}, ShapeError, r"k_cache: expected .*D=9\), got \(5, 2, 16, 8\)"),
        ({"q": torch.ones(2, 3, 8)}, ShapeError, r"k_cache: expected KH to divide H=3 .* KH=2"),
        ({"v_cache": torch.ones(5, 2, 8, 8)}, ShapeError, r"v_cache: .*BS=16, D=8\), got \(5, 2"),
        (
            {"block_tables": torch.ones(3, 2).long()},
            ShapeError,
            r"block_tables: .*\(B=2, M.*\(3, 2",
        ),
        (
            {"block_tables": torch.ones(2, 2).int()},
            DtypeError,
            r"block_tables: expected torch.int6",
        ),
        ({"seq_lens": torch.ones(3).int()}, ShapeError, r"seq_lens: .*\(B=2\), got \(3,\)"),
        ({"kv_of_head": torch.ones(3).long()}, ShapeError, r"kv_of_head: .*\(H=4\), got \(3,\)"),
        ({"window": 0}, KernelError, r"window: expected at least 1 or None, got 0"),
    ],
)
def test_decode_refuses_bad_arguments(change, error, message):
    inputs = {
        "q": torch.ones(2, 4, 8),
        "k_cache": torch.ones(5, 2, 16, 8),
        "v_cache": torch.ones(5, 2, 16, 8),
        "block_tables": torch.ones(2, 2, dtype=torch.int64),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    }
    paged_attention_decode(**inputs)
    with pytest.raises(error, match=message):
        paged_attention_decode(**(inputs | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"context_lens": torch.ones(1).long()}, DtypeError, r"context_lens: expected torch.int32"),
        ({"context_lens": torch.ones(2).int()}, ShapeError, r"context_lens: .*\(R=1\), got \(2,\)"),
        ({"cu_seqlens": torch.ones(3).int()}, ShapeError, r"cu_seqlens: .*\(R\+1=2\), got \(3,\)"),
        ({"window": -1}, KernelError, r"window: expected at least 1 or None, got -1"),
    ],
)
def test_prefill_refuses_bad_arguments(change, error, message):
    inputs = {
        "q": torch.ones(2, 4, 8),
        "k_cache": torch.ones(5, 2, 16, 8),
        "v_cache": torch.ones(5, 2, 16, 8),
        "block_tables": torch.ones(1, 2, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        "context_lens": torch.zeros(1, dtype=torch.int32),
        "scale": 1.0,
    }
    paged_attention_prefill(**inputs)
    with pytest.raises(error, match=message):
        paged_attention_prefill(**(inputs | change))
