// Prefill of paged_attention: a block of tokens of a row, all heads that share a kv head.
//
// Keys and values become panels of floats, a chunk at a time. Tiles of queries take them in: tokens
// and the heads that share the kv head are rows of the same tiles, heads of a token together.
#pragma once

#include "attention.h"

// Floats of the queries of a block, and as many of the keys of a chunk: with values and outputs,
// they fit an L2 cache.
#define OPERAND_FLOATS 16384

struct block {
    const int64_t *table, *heads;
    int64_t kv_head, sharing;  // heads that share the kv head
    int64_t token, tokens;
    int64_t position;  // of the first token
    // Scratch. A block has `queries`, whole tiles, and a chunk has `chunk` keys, whole panels.
    int64_t queries, chunk;
    float *q, *y;             // (queries, D')
    float *keys;              // panels of (D', TILE_COLUMNS)
    float *values;            // panels of (chunk, TILE_COLUMNS)
    float *scores;            // (TILE_ROWS, chunk)
    struct softmax *softmax;  // by query
    int64_t *positions;       // by query
    int64_t *k_at, *v_at;     // by key
};

static void take_scratch(const struct attention *a, struct block *b) {
    int64_t padded = a->padded_dim, panels = round_up(padded, TILE_COLUMNS);
    b->queries = round_up(b->tokens * b->sharing, TILE_ROWS);
    b->chunk = round_up(max64(1, OPERAND_FLOATS / padded), TILE_COLUMNS);
    int64_t softmax_bytes = b->queries * (int64_t)sizeof *b->softmax;
    int64_t floats = 2 * b->queries * padded + b->chunk * (padded + panels + TILE_ROWS);
    char *next = scratch(floats * 4 + softmax_bytes + (b->queries + 2 * b->chunk) * 8 + 9 * 64);
    b->q = take(&next, b->queries * padded * 4);
    b->y = take(&next, b->queries * padded * 4);
    b->keys = take(&next, b->chunk * padded * 4);
    b->values = take(&next, b->chunk * panels * 4);
    b->scores = take(&next, b->chunk * TILE_ROWS * 4);
    b->softmax = take(&next, softmax_bytes);
    b->positions = take(&next, b->queries * 8);
    b->k_at = take(&next, b->chunk * 8);
    b->v_at = take(&next, b->chunk * 8);
}

// The last query stands for those that fill up the last tile.
static void load_queries(const struct attention *a, struct block *b) {
    for (int64_t i = 0; i < b->queries; i++) {
        int64_t token = min64(i / b->sharing, b->tokens - 1);
        b->positions[i] = b->position + token;
        b->softmax[i] = empty_softmax();
        load_query(a, b->token + token, b->heads[i % b->sharing], b->q + i * a->padded_dim);
    }
    memset(b->y, 0, (size_t)(b->queries * a->padded_dim) * sizeof *b->y);
}

static void pack_keys(const struct attention *a, struct block *b, int64_t count) {
    FOR_DTYPE(a->k.dtype, {
        for (int64_t j = 0; j < count; j += LANES)
            for (int64_t d = 0; d < a->dim; d += LANES) {
                vf square[LANES] = {{0}};
                for (int64_t i = 0; i < min64(LANES, count - j); i++)
                    square[i] = load_part(a->k.data, DTYPE, b->k_at[j + i] + d, a->dim - d);
                transpose(square);
                int64_t panel = j / TILE_COLUMNS * TILE_COLUMNS;
                float *target = b->keys + panel * a->padded_dim + d * TILE_COLUMNS + j - panel;
                for (int i = 0; i < LANES; i++)
                    store(target, FLOAT32, i * TILE_COLUMNS, square[i]);
            }
    })
}
static void pack_values(const struct attention *a, struct block *b, int64_t count) {
    FOR_DTYPE(a->v.dtype, {
        for (int64_t j = 0; j < count; j++)
            for (int64_t d = 0; d < a->dim; d += LANES) {
                int64_t panel = d / TILE_COLUMNS * TILE_COLUMNS;
                store(b->values, FLOAT32, panel * b->chunk + j * TILE_COLUMNS + d - panel,
                      load_part(a->v.data, DTYPE, b->v_at[j] + d, a->dim - d));
            }
    })
}

// Scores of queries i to i + TILE_ROWS - 1 for the keys of `vectors` vectors from j on.
INLINE void score_tile(const struct attention *a, struct block *b, int64_t i, int64_t j,
                       int vectors) {
    int64_t panel = j / TILE_COLUMNS * TILE_COLUMNS;
    vf sums[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    tile_multiply(sums, TILE_ROWS, vectors, b->q + i * a->padded_dim, a->padded_dim, 1,
                  b->keys + panel * a->padded_dim + j - panel, TILE_COLUMNS, a->dim);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(b->scores, FLOAT32, r * b->chunk + j + v * LANES, sums[r][v] * a->scale);
}

// y = y shrink + weights V for queries i to i + TILE_ROWS - 1 and the vectors from d on.
INLINE void value_tile(const struct attention *a, struct block *b, int64_t i, int64_t d,
                       int vectors, int64_t begin, int64_t end, const float shrink[TILE_ROWS]) {
    int64_t panel = d / TILE_COLUMNS * TILE_COLUMNS;
    float *y = b->y + i * a->padded_dim + d;
    vf sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = load(y, FLOAT32, r * a->padded_dim + v * LANES) * shrink[r];
    tile_multiply(sums, TILE_ROWS, vectors, b->scores + begin, b->chunk, 1,
                  b->values + panel * b->chunk + begin * TILE_COLUMNS + d - panel, TILE_COLUMNS,
                  end - begin);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(y, FLOAT32, r * a->padded_dim + v * LANES, sums[r][v]);
}

// One tile of queries over a chunk of `count` keys from position `first` on.
static void attend_tile(const struct attention *a, struct block *b, int64_t i, int64_t first,
                        int64_t count) {
    const int64_t *positions = b->positions + i;
    // Keys that some query sees.
    int64_t begin = max64(0, positions[0] + 1 - a->window - first);
    int64_t end = min64(count, positions[TILE_ROWS - 1] + 1 - first);
    if (begin >= end) return;
    int64_t start = begin / LANES * LANES, stop = round_up(end, LANES), j = start;
    while (j < stop)
        if (j % TILE_COLUMNS == 0 && j + TILE_COLUMNS <= stop) {
            score_tile(a, b, i, j, TILE_VECTORS);
            j += TILE_COLUMNS;
        } else {
            score_tile(a, b, i, j, 1);
            j += LANES;
        }
    float shrink[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        float *scores = b->scores + r * b->chunk;
        int64_t after = positions[r] + 1 - first;
        hide(scores, start, min64(after - a->window, stop));
        hide(scores, max64(after, start), stop);
        shrink[r] = weigh(&b->softmax[i + r], scores, start, stop);
    }
    int64_t d = 0;
    for (; d + TILE_COLUMNS <= a->padded_dim; d += TILE_COLUMNS)
        value_tile(a, b, i, d, TILE_VECTORS, begin, end, shrink);
    for (; d < a->padded_dim; d += LANES) value_tile(a, b, i, d, 1, begin, end, shrink);
}

// Tokens of a block when at most `sharing` heads share a kv head.
INLINE int64_t tokens_of_block(const struct attention *a, int64_t sharing) {
    int64_t queries = OPERAND_FLOATS / a->padded_dim / TILE_ROWS * TILE_ROWS;
    return max64(1, queries / max64(1, sharing));
}

// `tokens` tokens from `token` on, the first at `position` of a row with the blocks of `table`.
static void attend_block(const struct attention *a, const int64_t *table, int64_t kv_head,
                         int64_t token, int64_t tokens, int64_t position) {
    int64_t first_head = a->head_bounds[kv_head];
    struct block b = {.table = table, .heads = a->head_of + first_head, .kv_head = kv_head,
                      .sharing = a->head_bounds[kv_head + 1] - first_head, .token = token,
                      .tokens = tokens, .position = position};
    if (b.sharing == 0) return;
    take_scratch(a, &b);
    load_queries(a, &b);
    int64_t end = position + tokens;
    for (int64_t first = max64(0, position + 1 - a->window); first < end; first += b.chunk) {
        int64_t count = min64(b.chunk, end - first);
        locate(a, table, kv_head, first, count, b.k_at, b.v_at);
        pack_keys(a, &b, count);
        pack_values(a, &b, count);
        for (int64_t i = 0; i < b.queries; i += TILE_ROWS) attend_tile(a, &b, i, first, count);
    }
    for (int64_t i = 0; i < tokens * b.sharing; i++)
        store_output(a, token + i / b.sharing, b.heads[i % b.sharing], b.y + i * a->padded_dim,
                     hsum(b.softmax[i].total));
}
