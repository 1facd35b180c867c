// kv_write; arguments as in op.py. Threads share out the tokens.
//
// T packed tokens, KH kv heads, D attention head dim, NB blocks, BS block size in tokens.
#include "plait.h"

// Below this number of elements threads cost more than they save.
#define PARALLEL_ELEMENTS (1 << 15)

struct vectors {
    const void *data;
    enum dtype dtype;
    int64_t token, head;  // elements between tokens and between heads
};

struct cache {
    void *data;
    enum dtype dtype;
    int64_t block;  // elements between blocks
};

INLINE void convert(const void *from, enum dtype from_dtype, void *to, enum dtype to_dtype,
                    int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to, to_dtype, i, load(from, from_dtype, i));
    if (i < count) store_some(to, to_dtype, i, count - i, load_some(from, from_dtype, i, count - i));
}

INLINE void convert_from(const void *from, enum dtype from_dtype, void *to, enum dtype to_dtype,
                         int64_t count) {
    switch (to_dtype) {
    case FLOAT32: convert(from, from_dtype, to, FLOAT32, count); break;
    case BFLOAT16: convert(from, from_dtype, to, BFLOAT16, count); break;
    case FLOAT16: convert(from, from_dtype, to, FLOAT16, count); break;
    }
}

static void copy(const void *from, enum dtype from_dtype, void *to, enum dtype to_dtype,
                 int64_t count) {
    if (from_dtype == to_dtype) {
        memcpy(to, from, (size_t)(count * dtype_bytes(to_dtype)));
        return;
    }
    switch (from_dtype) {
    case FLOAT32: convert_from(from, FLOAT32, to, to_dtype, count); break;
    case BFLOAT16: convert_from(from, BFLOAT16, to, to_dtype, count); break;
    case FLOAT16: convert_from(from, FLOAT16, to, to_dtype, count); break;
    }
}

INLINE void write_token(const struct vectors *x, const struct cache *cache, int64_t token,
                        int64_t block, int64_t offset, int64_t block_size, int64_t heads,
                        int64_t dim) {
    for (int64_t h = 0; h < heads; h++) {
        int64_t target = block * cache->block + (h * block_size + offset) * dim;
        copy(at(x->data, x->dtype, token * x->token + h * x->head), x->dtype,
             at_mut(cache->data, cache->dtype, target), cache->dtype, dim);
    }
}

EXPORT void kv_write(const void *k, int64_t k_dtype, int64_t k_token, int64_t k_head, const void *v,
                     int64_t v_dtype, int64_t v_token, int64_t v_head, void *k_cache,
                     int64_t k_cache_dtype, int64_t k_block, void *v_cache, int64_t v_cache_dtype,
                     int64_t v_block, const int64_t *token_slots, int64_t tokens, int64_t heads,
                     int64_t block_size, int64_t dim) {
    struct vectors keys = {k, (enum dtype)k_dtype, k_token, k_head};
    struct vectors values = {v, (enum dtype)v_dtype, v_token, v_head};
    struct cache key_cache = {k_cache, (enum dtype)k_cache_dtype, k_block};
    struct cache value_cache = {v_cache, (enum dtype)v_cache_dtype, v_block};
#pragma omp parallel for schedule(static) if (tokens * heads * dim > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; t++) {
        int64_t slot = token_slots[t];
        if (slot < block_size) continue;  // of the null block
        int64_t block = slot / block_size, offset = slot % block_size;
        write_token(&keys, &key_cache, t, block, offset, block_size, heads, dim);
        write_token(&values, &value_cache, t, block, offset, block_size, heads, dim);
    }
}
