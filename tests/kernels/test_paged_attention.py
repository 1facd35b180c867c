"""paged_attention_prefill and paged_attention_decode."""

import mmap

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

pytestmark = pytest.mark.usefixtures("backend")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BLOCK_SIZE = 16
HEAD_DIM = 8


def cache_inputs(make, seq_lens, *, kv_heads, cache_dtype, block_size, head_dim):
    """Caches that are NaN but for the positions below `seq_lens`, blocks in shuffled order."""
    counts = [-(-length // block_size) for length in seq_lens]
    part = ((kv_heads, block_size, head_dim), cache_dtype)
    k_cache, v_cache = make.units(sum(counts) + 2, part, part)
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    tables = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int64)
    for row, length in enumerate(seq_lens):
        for column in range(counts[row]):
            block = free.pop()
            tables[row, column] = block
            used = min(block_size, length - column * block_size)
            k_cache[block, :, :used] = make.normal(kv_heads, used, head_dim, dtype=cache_dtype)
            v_cache[block, :, :used] = make.normal(kv_heads, used, head_dim, dtype=cache_dtype)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables.to(make.device),
        "scale": head_dim**-0.5,
    }


def prefill_inputs(
    make,
    lengths,
    contexts,
    *,
    heads=4,
    kv_heads=2,
    dtype=F32,
    cache_dtype=F32,
    block_size=BLOCK_SIZE,
    head_dim=HEAD_DIM,
):
    seq_lens = [length + context for length, context in zip(lengths, contexts, strict=True)]
    cache = cache_inputs(
        make,
        seq_lens,
        kv_heads=kv_heads,
        cache_dtype=cache_dtype,
        block_size=block_size,
        head_dim=head_dim,
    )
    return cache | {
        "q": make.normal(sum(lengths), heads, head_dim, dtype=dtype),
        "cu_seqlens": make.packed_rows(lengths)["cu_seqlens"],
        "context_lens": make.int32(*contexts),
    }


def decode_inputs(
    make,
    seq_lens,
    *,
    heads=4,
    kv_heads=2,
    dtype=F32,
    cache_dtype=F32,
    block_size=BLOCK_SIZE,
    head_dim=HEAD_DIM,
):
    cache = cache_inputs(
        make,
        seq_lens,
        kv_heads=kv_heads,
        cache_dtype=cache_dtype,
        block_size=block_size,
        head_dim=head_dim,
    )
    return cache | {
        "q": make.normal(len(seq_lens), heads, head_dim, dtype=dtype),
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


@pytest.mark.parametrize("sharing", [1, 2, 3, 4, 5, 6, 7, 13])
def test_any_number_of_heads_share_a_kv_head(make, match, sharing):
    heads = {"heads": 2 * sharing, "kv_heads": 2, "dtype": BF16, "cache_dtype": BF16}
    check_prefill(match, prefill_inputs(make, (9, 1), (10, 3), **heads))
    check_decode(match, decode_inputs(make, (19, 3), **heads))


@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_takes_any_block_size(make, match, block_size):
    sizes = {"block_size": block_size, "cache_dtype": BF16}
    check_prefill(match, prefill_inputs(make, (20, 5), (7, 100), **sizes))
    check_decode(match, decode_inputs(make, (1, 99, 101, 70), **sizes))


# Not float32 with 128: there plain torch's own attention is more than twice as far off as the dot
# products of the reference, which run in many chains.
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(dim, dtype) for dim in (1, 4, 7, 9, 33, 64, 80) for dtype in (F32, BF16, F16)]
    + [(128, BF16), (128, F16)],
)
def test_takes_any_head_dim(make, match, head_dim, dtype):
    sizes = {"head_dim": head_dim, "heads": 3, "kv_heads": 1, "dtype": dtype, "cache_dtype": dtype}
    check_prefill(match, prefill_inputs(make, (11,), (30,), **sizes))
    check_decode(match, decode_inputs(make, (41, 3), **sizes))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("window", [None, 70, 1500])
def test_long_rows(make, match, window, heads):
    """A prefill packs keys in chunks, a decode is cut into pieces: both lie well below 2000."""
    sizes = {"heads": heads, "cache_dtype": BF16, "block_size": 100}
    inputs = decode_inputs(make, (1023, 1024, 1025, 2100, 5), **sizes)
    check_decode(match, inputs | {"window": window})
    inputs = prefill_inputs(make, (3, 10), (2090, 5), head_dim=33, **sizes)
    check_prefill(match, inputs | {"window": window})


def test_many_tokens_are_shared_out(make, match):
    sizes = {"heads": 6, "dtype": BF16, "cache_dtype": BF16, "head_dim": 64}
    check_prefill(match, prefill_inputs(make, (130, 1, 70), (0, 9, 40), **sizes))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_q_and_tables_may_be_strided(make, match, dtype):
    prefill = prefill_inputs(make, (9, 20), (10, 0), dtype=dtype)
    decode = decode_inputs(make, (19, 3), dtype=dtype)
    for inputs, check in ((prefill, check_prefill), (decode, check_decode)):
        tokens = len(inputs["q"])
        inputs["q"] = make.normal(tokens, 50, dtype=dtype)[:, 5:37].unflatten(1, (4, HEAD_DIM))
        check(match, inputs)
        inputs["q"] = make.normal(HEAD_DIM, 4, tokens, dtype=dtype).permute(2, 1, 0)
        wide = torch.zeros(2, 2 * inputs["block_tables"].shape[1], dtype=torch.int64)
        wide[:, ::2] = inputs["block_tables"]
        inputs["block_tables"] = wide.to(make.device)[:, ::2]
        check(match, inputs)


def test_caches_may_differ_in_dtype_and_stride(make, match):
    for inputs, check in (
        (prefill_inputs(make, (9, 2), (10, 0), cache_dtype=BF16), check_prefill),
        (decode_inputs(make, (19, 3), cache_dtype=BF16), check_decode),
    ):
        v_cache = inputs["v_cache"]
        (inputs["v_cache"],) = make.units(len(v_cache), (tuple(v_cache.shape[1:]), F16))
        inputs["v_cache"].copy_(v_cache)
        check(match, inputs)


@pytest.mark.parametrize("scale", [0.0, -0.5, 300.0])
def test_scores_may_be_far_from_zero(make, match, scale):
    """With the largest scale, all but one weight of most tokens is 0."""
    check_prefill(match, prefill_inputs(make, (25,), (30,)) | {"scale": scale})
    check_decode(match, decode_inputs(make, (70, 3)) | {"scale": scale})


class TestNative:
    """What C code alone promises."""

    @pytest.fixture
    def backend(self, native_backend):
        return native_backend

    @pytest.mark.parametrize("window", [None, 900])
    def test_threads_do_not_change_the_result(self, make, window):
        decode = decode_inputs(make, (2100, 300, 1), heads=6, cache_dtype=BF16) | {"window": window}
        prefill = prefill_inputs(make, (150, 30), (0, 300), heads=6, head_dim=64) | {
            "window": window
        }
        outs = []
        before = torch.get_num_threads()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append((paged_attention_decode(**decode), paged_attention_prefill(**prefill)))
        torch.set_num_threads(before)
        for decoded, prefilled in outs[1:]:
            assert torch.equal(decoded, outs[0][0])
            assert torch.equal(prefilled, outs[0][1])

    def test_row_of_a_batch_equals_a_batch_of_one(self, make):
        inputs = decode_inputs(make, (40, 1300, 7), heads=6, cache_dtype=BF16)
        together = paged_attention_decode(**inputs)
        for row in range(3):
            one = {name: inputs[name][row : row + 1] for name in ("q", "block_tables", "seq_lens")}
            assert torch.equal(together[row : row + 1], paged_attention_decode(**(inputs | one)))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_key_that_is_not_finite_is_seen_by_later_tokens_only(self, make, bad):
        inputs = prefill_inputs(make, (40,), (0,), heads=2)
        block = inputs["block_tables"][0, 1]
        inputs["q"] = inputs["q"].abs()
        inputs["k_cache"][block, :, 14] = bad  # of token 30
        out = paged_attention_prefill(**inputs)
        assert out[:30].isfinite().all()
        assert out[30:].isnan().all()


def test_no_tokens_and_no_rows(make):
    prefill = prefill_inputs(make, (4,), (0,))
    none = {"cu_seqlens": make.int32(0), "context_lens": make.int32()}
    none |= {"block_tables": prefill["block_tables"][:0]}
    assert (paged_attention_prefill(**(prefill | none)) == 0).all()
    assert paged_attention_prefill(**(prefill | none | {"q": prefill["q"][:0]})).shape == (0, 4, 8)
    decode = decode_inputs(make, (4,))
    none = {name: decode[name][:0] for name in ("q", "block_tables", "seq_lens")}
    assert paged_attention_decode(**(decode | none)).shape == (0, 4, 8)


def test_blocks_beyond_4_gib(make):
    """The caches lie in a sparse mapping: only what is written takes memory."""
    if make.device.type != "cpu":
        pytest.skip("sparse mappings are memory of the host")
    unit_bytes, num_units = 1 << 20, 1 << 13
    buffer = torch.frombuffer(mmap.mmap(-1, num_units * unit_bytes), dtype=torch.uint8)
    units = buffer.view(num_units, unit_bytes)
    shape = (2, BLOCK_SIZE, HEAD_DIM)
    part = 2 * BLOCK_SIZE * HEAD_DIM * 4
    far = [num_units - 1, num_units // 2 + 1]
    near = prefill_inputs(make, (5,), (20,))
    sparse = dict(near)
    for first, name in enumerate(("k_cache", "v_cache")):
        view = units[:, first * part : (first + 1) * part].view(F32).unflatten(1, shape)
        view[far] = near[name][near["block_tables"][0, :2]]
        sparse[name] = view
    sparse["block_tables"] = make.int64(*far)[None]
    assert torch.equal(paged_attention_prefill(**sparse), paged_attention_prefill(**near))
    for inputs in (near, sparse):
        inputs["q"] = inputs["q"][-1:]
        del inputs["cu_seqlens"], inputs["context_lens"]
        inputs["seq_lens"] = make.int32(25)
    assert torch.equal(paged_attention_decode(**sparse), paged_attention_decode(**near))


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
