// What prefill and decode of paged_attention share.
//
// H heads, KH kv heads, D attention head dim, BS block size in tokens, M blocks of a row in the
// table; D' is D rounded up to whole vectors.
#pragma once

#include <float.h>
#include <stdlib.h>

#include "tile.h"

struct cache {
    const void *data;  // (blocks, KH, BS, D)
    enum dtype dtype;
    int64_t block;  // elements between blocks
};

struct attention {
    const void *q;          // (tokens, H, D)
    enum dtype dtype;       // of q and out
    int64_t token, head;    // elements between tokens and between heads of q
    struct cache k, v;
    const int64_t *tables;  // (rows, M)
    int64_t table_stride;
    int64_t heads, kv_heads, block_size, dim, padded_dim;
    int64_t window;  // positions that a token sees, less than 2^31
    float scale;
    void *out;  // (tokens, H, D)
    // The heads of kv head g are head_of[head_bounds[g]] to head_of[head_bounds[g + 1] - 1].
    int64_t *head_bounds, *head_of;
};

static void *allocate(int64_t bytes) {
    void *memory = aligned_alloc(64, (size_t)round_up(max64(1, bytes), 64));
    if (memory == NULL) abort();
    return memory;
}
// Memory of the calling thread, kept for its next call; the contents are undefined.
static void *scratch(int64_t bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        memory = allocate(size = bytes);
    }
    return memory;
}
// The first `bytes` of the memory at *next, which moves on to the next whole cache line.
INLINE void *take(char **next, int64_t bytes) {
    void *part = *next;
    *next += round_up(bytes, 64);
    return part;
}

// Sorts the heads by kv head, adjacent heads sharing one if kv_of_head is NULL. head_bounds is to
// be freed, head_of is a part of it.
static void group_heads(struct attention *a, const int64_t *kv_of_head) {
    int64_t *bounds = allocate((a->kv_heads + 2 + a->heads) * 8), *heads = bounds + a->kv_heads + 2;
    int64_t sharing = max64(1, a->heads / max64(1, a->kv_heads));
    memset(bounds, 0, (size_t)(a->kv_heads + 2) * sizeof *bounds);
    // Two places up are counts, then starts; each start moves on to the end, one place up.
    for (int64_t h = 0; h < a->heads; h++) bounds[(kv_of_head ? kv_of_head[h] : h / sharing) + 2]++;
    for (int64_t g = 0; g < a->kv_heads; g++) bounds[g + 2] += bounds[g + 1];
    for (int64_t h = 0; h < a->heads; h++)
        heads[bounds[(kv_of_head ? kv_of_head[h] : h / sharing) + 1]++] = h;
    a->head_bounds = bounds;
    a->head_of = heads;
}

// Where the keys and values of `count` positions of a row from `first` on are, as element indices.
static void locate(const struct attention *a, const int64_t *table, int64_t kv_head, int64_t first,
                   int64_t count, int64_t *k_at, int64_t *v_at) {
    int64_t column = first / a->block_size, offset = first % a->block_size;
    for (int64_t i = 0; i < count; column++, offset = 0) {
        int64_t end = min64(count, i + a->block_size - offset);
        int64_t inside = (kv_head * a->block_size + offset) * a->dim;
        int64_t k = table[column] * a->k.block + inside, v = table[column] * a->v.block + inside;
        for (; i < end; i++, k += a->dim, v += a->dim) {
            k_at[i] = k;
            v_at[i] = v;
        }
    }
}

// ---- memory to floats and back ----------------------------------------------------------------

// Out of line, for the last elements of heads that are not whole vectors.
static __attribute__((noinline)) vf load_tail(const void *base, enum dtype dtype, int64_t index,
                                              int64_t count) {
    return load_some(base, dtype, index, count);
}
// `count` elements, at most LANES; the other lanes are 0 and their memory is not touched.
INLINE vf load_part(const void *base, enum dtype dtype, int64_t index, int64_t count) {
    return count >= LANES ? load(base, dtype, index) : load_tail(base, dtype, index, count);
}

// RUN with the constant DTYPE that equals `code`.
#define FOR_DTYPE(code, RUN)                                                   \
    switch (code) {                                                            \
    case FLOAT32: { const enum dtype DTYPE = FLOAT32; RUN; break; }            \
    case BFLOAT16: { const enum dtype DTYPE = BFLOAT16; RUN; break; }          \
    case FLOAT16: { const enum dtype DTYPE = FLOAT16; RUN; break; }            \
    }

// One query, filled up with zeros to D'.
static void load_query(const struct attention *a, int64_t token, int64_t head, float *to) {
    int64_t index = token * a->token + head * a->head;
    FOR_DTYPE(a->dtype, {
        for (int64_t d = 0; d < a->dim; d += LANES)
            store(to, FLOAT32, d, load_part(a->q, DTYPE, index + d, a->dim - d));
    })
}
// The output of one query: y / total.
static void store_output(const struct attention *a, int64_t token, int64_t head, const float *y,
                         float total) {
    int64_t index = (token * a->heads + head) * a->dim;
    FOR_DTYPE(a->dtype, {
        for (int64_t d = 0; d < a->dim; d += LANES)
            store_upto(a->out, DTYPE, index + d, a->dim - d, load(y, FLOAT32, d) / total);
    })
}
static void clear_outputs(const struct attention *a, int64_t token, int64_t tokens) {
    int64_t bytes = a->heads * a->dim * dtype_bytes(a->dtype);
    memset((char *)a->out + token * bytes, 0, (size_t)(tokens * bytes));
}

// ---- softmax ----------------------------------------------------------------------------------

// As vexp for x <= 0, but 0 below -87 already. What vexp does for other x would cost as much again.
INLINE vf exp_nonpositive(vf x) {
    const float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    const float magic = 0x1.8p23f + 127;  // adding it leaves the exponent of 2^n in the low bits
    vf shifted = x * log2e + magic;
    vf n = shifted - magic;
    vf r = x - n * ln2_high - n * ln2_low;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vf y = p * (vf)((vi)shifted << 23);
    return (vf)((vi)y & ~(vi)(x < -87.0f));
}

// One query's softmax over the keys so far. Weights are relative to the largest score, and older
// sums shrink when a larger one comes.
struct softmax {
    vf total;       // of the weights, by lane
    float largest;  // never NaN
};
INLINE struct softmax empty_softmax(void) { return (struct softmax){{0}, -FLT_MAX}; }

// Turns scores begin to end - 1, whole vectors, into weights; returns the factor of older sums.
static float weigh(struct softmax *s, float *scores, int64_t begin, int64_t end) {
    vf largest[2] = {splat(s->largest), splat(s->largest)};  // a single chain waits for itself
    for (int64_t j = begin; j < end; j += LANES) {
        largest[1] = vmax(load(scores, FLOAT32, j), largest[1]);
        vf other = largest[0];
        largest[0] = largest[1];
        largest[1] = other;
    }
    float before = s->largest;
    s->largest = hmax(vmax(largest[0], largest[1]));
    vf shrink = exp_nonpositive(splat(before - s->largest)), total = s->total * shrink;
    for (int64_t j = begin; j < end; j += LANES) {
        vf weight = exp_nonpositive(load(scores, FLOAT32, j) - s->largest);
        store(scores, FLOAT32, j, weight);
        total += weight;
    }
    s->total = total;
    return shrink[0];
}
// Hides scores begin to end - 1 from the softmax.
INLINE void hide(float *scores, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) scores[j] = -INFINITY;
}
