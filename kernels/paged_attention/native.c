// paged_attention; arguments as in op.py.
//
// T packed tokens, R rows, B decode batch, H heads, KH kv heads, J heads on a kv head, D attention
// head dim, BS block size in tokens. D' is D rounded up to whole vectors.
//
// Both functions run over the keys a few at a time, from positions that are a multiple of their
// number: the sum of a token does not depend on what else is computed, nor on where its row is cut.
#include <stdlib.h>

#include "tile.h"

// Below this number of products of a query and a key element threads cost more than they save.
#define PARALLEL_WORK (1 << 17)
// Keys at a time. Those of a decode, with their values, and the floats of a prefill fill half of
// the second nearest cache.
#define DECODE_KEYS 128
#define KEYS 128
// Queries that share the keys of a prefill once they are floats.
#define QUERIES 192
// Heads of a kv head for which a decode reads a key once.
#define HEADS 4

struct cache {
    const void *data;
    enum dtype dtype;
    int64_t block;  // elements between blocks
};

struct attention {
    const void *q;
    enum dtype dtype;
    int64_t q_token, q_head;  // elements between tokens and between heads
    struct cache keys, values;
    const int64_t *tables;
    int64_t table_stride;
    int64_t num_heads, num_kv_heads, block_size, head_dim, window;
    float scale;
    void *out;
    // Those of kv head g are heads[first_head[g]] to heads[first_head[g + 1] - 1].
    int64_t *heads, *first_head;
    int64_t most_heads, padded_dim;
};

INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// ---- where things lie -------------------------------------------------------------------------

static void sort_heads(struct attention *a, const int64_t *kv_of_head) {
    int64_t heads = a->num_heads, kv_heads = a->num_kv_heads;
    a->first_head = calloc((size_t)(kv_heads + 2 + heads), sizeof(int64_t));
    a->heads = a->first_head + kv_heads + 2;
    // Counts two places on, so that the starts of the next loop move to their own place.
    int64_t *next = a->first_head + 1;
    int64_t share = kv_heads ? heads / kv_heads : 0;
    for (int64_t h = 0; h < heads; h++) next[1 + (kv_of_head ? kv_of_head[h] : h / share)]++;
    a->most_heads = 0;
    for (int64_t g = 1; g <= kv_heads; g++) {
        a->most_heads = max64(a->most_heads, next[g]);
        next[g] += next[g - 1];
    }
    for (int64_t h = 0; h < heads; h++) a->heads[next[kv_of_head ? kv_of_head[h] : h / share]++] = h;
}

// The elements of the caches at which the keys and the values of `count` positions start.
static void locate(const struct attention *a, int64_t row, int64_t kv_head, int64_t position,
                   int64_t count, int64_t *keys, int64_t *values) {
    const int64_t *block = a->tables + row * a->table_stride + position / a->block_size;
    int64_t offset = position % a->block_size;
    for (int64_t i = 0; i < count; i++) {
        int64_t inside = (kv_head * a->block_size + offset) * a->head_dim;
        keys[i] = *block * a->keys.block + inside;
        values[i] = *block * a->values.block + inside;
        if (++offset == a->block_size) {
            offset = 0;
            block++;
        }
    }
}

INLINE int64_t out_index(const struct attention *a, int64_t token, int64_t head) {
    return (token * a->num_heads + head) * a->head_dim;
}

static void clear_tokens(const struct attention *a, int64_t first, int64_t stop) {
    if (stop > first)
        memset(at_mut(a->out, a->dtype, out_index(a, first, 0)), 0,
               (size_t)(out_index(a, stop - first, 0) * dtype_bytes(a->dtype)));
}

// RUN with the constant DTYPE that equals `dtype`.
#define FOR_DTYPE(dtype, RUN)                                                  \
    switch (dtype) {                                                           \
    case FLOAT32: { enum { DTYPE = FLOAT32 }; RUN; break; }                    \
    case BFLOAT16: { enum { DTYPE = BFLOAT16 }; RUN; break; }                  \
    case FLOAT16: { enum { DTYPE = FLOAT16 }; RUN; break; }                    \
    }

// A maximum and sums relative to it, of the keys that came so far. The maximum starts finite: a
// difference of two of them is never NaN.
#define LEAST (-3.0e38f)

// weights = e^(scores - max), 0 for scores of -infinity; returns their sums.
INLINE vf exponentiate(float *scores, int64_t begin, int64_t end, float max) {
    vf total = {0};
    for (int64_t n = begin; n < end; n += LANES) {
        vf weight = vexp(load(scores, FLOAT32, n) - max);
        store(scores, FLOAT32, n, weight);
        total += weight;
    }
    return total;
}

// ---- decode -----------------------------------------------------------------------------------

// The last vector of a head ends where the head does, and so may overlap the one before.
INLINE int64_t first_dim(int64_t vector, int64_t dim) {
    return max64(0, min64(vector * LANES, dim - LANES));
}

// Lane r of the result is the sum of row r.
INLINE vf sum_rows(vf square[LANES]) {
#pragma GCC unroll 4
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        vi is_right = (LANE_NUMBERS & distance) != 0;  // -1 or 0
        vi upper = LANE_NUMBERS + (is_right & (LANES - distance)), lower = upper + distance;
#pragma GCC unroll 16
        for (int r = 0; r < distance; r++) {
            vf a = square[r], b = square[r + distance];
            square[r] = __builtin_shuffle(a, b, upper) + __builtin_shuffle(a, b, lower);
        }
    }
    return square[0];
}

// Scratch of one row and kv head; every head has D' floats of q and of sums.
struct decode {
    float *q, *sums;
    float *max;
    vf *total;
    float scores[HEADS * DECODE_KEYS];
    int64_t keys[DECODE_KEYS], values[DECODE_KEYS];
};

// Scores of `count` keys, which is rounded up to whole vectors. The keys array is filled up.
INLINE void score_keys(const struct attention *a, struct decode *w, enum dtype dtype, int heads,
                       const float *q, int64_t count) {
    const int together = heads > 2 ? 2 : 4;
    int64_t dim = a->head_dim, padded = a->padded_dim;
    for (int64_t n = 0; n < count; n += LANES) {
        vf products[HEADS][LANES];
        for (int i = 0; i < LANES; i += together) {
            const int64_t *keys = w->keys + n + i;
            vf sums[HEADS][4] = {{{0}}};
            for (int64_t d = 0; d < padded; d += LANES) {
                int64_t first = max64(0, min64(d, dim - LANES));
                vf query[HEADS];
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) query[h] = load(q, FLOAT32, h * padded + d);
#pragma GCC unroll 4
                for (int k = 0; k < together; k++) {
                    vf key = load_upto(a->keys.data, dtype, keys[k] + first, dim);
#pragma GCC unroll 4
                    for (int h = 0; h < heads; h++) sums[h][k] += query[h] * key;
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
                for (int k = 0; k < together; k++) products[h][i + k] = sums[h][k];
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            store(w->scores, FLOAT32, h * DECODE_KEYS + n, sum_rows(products[h]));
    }
}

INLINE void add_vectors(const struct attention *a, struct decode *w, enum dtype dtype, int heads,
                        int vectors, float *sums, const vf *factor, int64_t d, int64_t count) {
    int64_t dim = a->head_dim, padded = a->padded_dim;
    int64_t first = max64(0, min64(d, dim - LANES));
    vf sum[HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[h][v] = load(sums, FLOAT32, h * padded + d + v * LANES) * factor[h];
    for (int64_t i = 0; i < count; i++) {
        vf value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = load_upto(a->values.data, dtype, w->values[i] + first + v * LANES, dim);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            vf weight = splat(w->scores[h * DECODE_KEYS + i]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[h][v] += weight * value[v];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store(sums, FLOAT32, h * padded + d + v * LANES, sum[h][v]);
}

// sums = sums * factor + the weighted values.
INLINE void add_values(const struct attention *a, struct decode *w, enum dtype dtype, int heads,
                       float *sums, const vf *factor, int64_t count) {
    const int vectors = heads > 2 ? 2 : 4;
    int64_t whole = a->head_dim / LANES * LANES, d = 0;
    for (; d + vectors * LANES <= whole; d += vectors * LANES)
        add_vectors(a, w, dtype, heads, vectors, sums, factor, d, count);
    for (; d < a->padded_dim; d += LANES)
        add_vectors(a, w, dtype, heads, 1, sums, factor, d, count);
}

// What `heads` heads, the first of them at place `head`, see of `count` keys.
INLINE void attend_keys(const struct attention *a, struct decode *w, int heads, int64_t head,
                        int64_t begin, int64_t count) {
    const float *q = w->q + head * a->padded_dim;
    vf factor[HEADS];
    FOR_DTYPE(a->keys.dtype, score_keys(a, w, DTYPE, heads, q, count))
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        float *scores = w->scores + h * DECODE_KEYS;
        for (int64_t n = 0; n < begin; n++) scores[n] = -INFINITY;
        for (int64_t n = count; n < round_up(count, LANES); n++) scores[n] = -INFINITY;
        vf most = splat(w->max[head + h]);
        for (int64_t n = 0; n < count; n += LANES) most = vmax(load(scores, FLOAT32, n), most);
        float max = hmax(most);
        factor[h] = vexp(splat(w->max[head + h] - max));
        w->max[head + h] = max;
        w->total[head + h] = w->total[head + h] * factor[h] + exponentiate(scores, 0, count, max);
    }
    float *sums = w->sums + head * a->padded_dim;
    FOR_DTYPE(a->values.dtype, add_values(a, w, DTYPE, heads, sums, factor, count))
}
