// paged_attention; arguments as in op.py. Threads share out blocks of tokens of a prefill and pieces
// of rows of a decode, each with the heads of one kv head.
#include "attention_decode.h"
#include "attention_prefill.h"

// Below this number of products threads cost more than they save.
#define PARALLEL_PRODUCTS (1 << 17)

EXPORT void paged_attention_prefill(
    const void *q, int64_t q_dtype, int64_t q_token, int64_t q_head, const void *k,
    int64_t k_dtype, int64_t k_block, const void *v, int64_t v_dtype, int64_t v_block,
    const int64_t *tables, int64_t table_stride, const int64_t *kv_of_head, int64_t heads,
    int64_t kv_heads, int64_t block_size, int64_t dim, int64_t window, float scale, void *out,
    const int32_t *cu_seqlens, const int32_t *context_lens, int64_t rows, int64_t tokens) {
    struct attention a = {q, (enum dtype)q_dtype, q_token, q_head,
                          {k, (enum dtype)k_dtype, k_block}, {v, (enum dtype)v_dtype, v_block},
                          tables, table_stride, heads, kv_heads, block_size, dim,
                          round_up(dim, LANES), window, scale, out, NULL, NULL};
    group_heads(&a, kv_of_head);
    int64_t longest = 0, seen = 0, sharing = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t length = cu_seqlens[r + 1] - cu_seqlens[r];
        longest = max64(longest, length);
        seen += length * min64(context_lens[r] + length, window);
        if (length > 0 && tables[r * table_stride] == 0) clear_outputs(&a, cu_seqlens[r], length);
    }
    clear_outputs(&a, cu_seqlens[rows], tokens - cu_seqlens[rows]);
    for (int64_t g = 0; g < kv_heads; g++)
        sharing = max64(sharing, a.head_bounds[g + 1] - a.head_bounds[g]);
    int64_t block = tokens_of_block(&a, sharing), blocks = (longest + block - 1) / block;
    int64_t tasks = blocks * rows * kv_heads, next = 0;
#pragma omp parallel if (seen * heads * dim > PARALLEL_PRODUCTS)
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) {
        // The last blocks see most: they come first, lest one thread is left with them.
        int64_t row = task / kv_heads % rows, first = (blocks - 1 - task / kv_heads / rows) * block;
        int64_t start = cu_seqlens[row], length = cu_seqlens[row + 1] - start;
        const int64_t *table = tables + row * table_stride;
        if (first < length && table[0] != 0)
            attend_block(&a, table, task % kv_heads, start + first, min64(block, length - first),
                         context_lens[row] + first);
    }
    free(a.head_bounds);
}

EXPORT void paged_attention_decode(
    const void *q, int64_t q_dtype, int64_t q_token, int64_t q_head, const void *k,
    int64_t k_dtype, int64_t k_block, const void *v, int64_t v_dtype, int64_t v_block,
    const int64_t *tables, int64_t table_stride, const int64_t *kv_of_head, int64_t heads,
    int64_t kv_heads, int64_t block_size, int64_t dim, int64_t window, float scale, void *out,
    const int32_t *seq_lens, int64_t rows) {
    struct attention a = {q, (enum dtype)q_dtype, q_token, q_head,
                          {k, (enum dtype)k_dtype, k_block}, {v, (enum dtype)v_dtype, v_block},
                          tables, table_stride, heads, kv_heads, block_size, dim,
                          round_up(dim, LANES), window, scale, out, NULL, NULL};
    group_heads(&a, kv_of_head);
    int64_t longest = 0, seen = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t length = min64(seq_lens[r], window);
        longest = max64(longest, length);
        seen += length;
        if (length == 0) clear_outputs(&a, r, 1);
    }
    struct pieces p = {seq_lens, (longest + PIECE - 1) / PIECE, a.padded_dim + LANES, NULL};
    if (p.most > 1) p.results = allocate(rows * heads * p.most * p.floats * 4);
    bool is_large = seen * heads * dim > PARALLEL_PRODUCTS;
    int64_t tasks = rows * kv_heads * p.most, next = 0;
#pragma omp parallel if (is_large)
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;)
        attend_piece(&a, &p, task / p.most / kv_heads, task / p.most % kv_heads, task % p.most);
    if (p.most > 1) {
#pragma omp parallel for collapse(2) schedule(static) if (is_large)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < heads; h++) merge_pieces(&a, &p, r, h);
    }
    free(p.results);
    free(a.head_bounds);
}
