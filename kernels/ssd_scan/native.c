// ssd_scan; arguments as in op.py. Threads share out the rows and blocks of heads.
#include <omp.h>
#include <stdlib.h>

#include "ssd_chunk.h"

// Below this number of state elements times tokens, threads cost more than they save.
#define PARALLEL_WORK (1 << 16)

// ---- outputs ----------------------------------------------------------------------------------

// The output of a token, LANES elements from p on.
INLINE void finish(const struct scan *s, int64_t head, int64_t token, int64_t p, vf y) {
    int64_t target = (token * s->heads + head) * s->head_dim + p, count = s->head_dim - p;
    if (s->z.data)
        y *= silu(load_upto(s->z.data, s->z.dtype, token * s->z.token + head * s->z.inner + p,
                            count));
    if (s->x.dtype == BFLOAT16)
        store_upto(s->out, BFLOAT16, target, count, y);
    else if (s->x.dtype == FLOAT16)
        store_upto(s->out, FLOAT16, target, count, y);
    else
        store_upto(s->out, FLOAT32, target, count, y);
}

// w->y holds a chunk with its tokens side by side.
static void finish_chunk(const struct scan *s, struct work *w, int64_t head, int64_t begin,
                         int64_t tokens) {
    for (int64_t i = 0; i < tokens; i += LANES)
        for (int64_t p = 0; p < s->head_dim; p += LANES) {
            vf y[LANES];
            for (int r = 0; r < LANES; r++) y[r] = load(w->y, FLOAT32, (p + r) * CHUNK + i);
            transpose(y);
            for (int r = 0; r < min64(LANES, tokens - i); r++)
                finish(s, head, begin + i + r, p, y[r]);
        }
}

// Rows of the state that are stepped side by side; they divide LANES.
#define STEP_ROWS 4

INLINE void step_rows(float *h, int64_t padded, float decay, const float *inputs, const float *B,
                      const float *C, vf *sums) {
    vf input[STEP_ROWS], sum[STEP_ROWS] = {{0}};
    for (int r = 0; r < STEP_ROWS; r++) input[r] = splat(inputs[r]);
    for (int64_t n = 0; n < padded; n += LANES) {
        vf b = load(B, FLOAT32, n), c = load(C, FLOAT32, n);
#pragma GCC unroll 4
        for (int r = 0; r < STEP_ROWS; r++) {
            vf value = load(h, FLOAT32, r * padded + n) * decay + input[r] * b;
            store(h, FLOAT32, r * padded + n, value);
            sum[r] += value * c;
        }
    }
    memcpy(sums, sum, sizeof sum);
}

// Token by token: h' = decay h + step x B^T, y = h' C + D x.
static void step_tokens(const struct scan *s, struct work *w, float *h, int64_t head,
                        int64_t begin, int64_t tokens) {
    int64_t padded = s->padded_state_dim;
    float skip = s->D ? s->D[head] : 0.0f;
    for (int64_t p = 0; p < s->head_dim; p += LANES)
        for (int64_t j = 0; j < tokens; j++) {
            int64_t first = j * s->padded_head_dim + p;
            vf sums[LANES];
            for (int r = 0; r < LANES; r += STEP_ROWS)
                step_rows(h + (p + r) * padded, padded, w->from_start[j], w->inputs + first + r,
                          w->B + j * padded, w->C + j * padded, sums + r);
            transpose(sums);
            vf y = load(w->x, FLOAT32, first) * skip;
            for (int r = 0; r < LANES; r++) y += sums[r];
            finish(s, head, begin + j, p, y);
        }
}

static void scan_chunk(const struct scan *s, struct work *w, float *h, bool is_zero, int64_t head,
                       int64_t begin, int64_t tokens) {
    load_steps(s, w, head, begin, tokens);
    if (tokens <= FEW_TOKENS) {
        decay_by_token(w);
        load_inputs(s, w, head, begin, tokens);
        step_tokens(s, w, h, head, begin, tokens);
    } else {
        sum_decays(w, tokens);
        load_inputs(s, w, head, begin, tokens);
        mix_tokens(s, w, head, tokens);
        multiply_chunk(s, w, h, is_zero, tokens);
        finish_chunk(s, w, head, begin, tokens);
    }
}

// ---- rows -------------------------------------------------------------------------------------

static void read_state(const struct scan *s, float *h, int64_t slot, int64_t head) {
    int64_t dim = s->state_dim, padded = s->padded_state_dim;
    if (slot == 0) {
        memset(h, 0, sizeof(float) * s->head_dim * padded);
        return;
    }
    int64_t source = slot * s->slot_stride + head * s->head_dim * dim;
    for (int64_t p = 0; p < s->head_dim; p++)
        for (int64_t n = 0; n < dim; n += LANES)
            store(h, FLOAT32, p * padded + n,
                  load_upto(s->state, s->state_dtype, source + p * dim + n, dim - n));
}

// The state of `row` right after `token`.
static void write_state(const struct scan *s, const float *h, int64_t slot, int64_t head,
                        int64_t row, int64_t token) {
    int64_t dim = s->state_dim, padded = s->padded_state_dim, first = head * s->head_dim * dim;
    bool is_stochastic = s->rounding.seeds != NULL;
    uint32_t key = 0;
    if (is_stochastic)
        key = row_key(s->rounding.seeds[row],
                      s->rounding.positions[row] + token - s->cu_seqlens[row], s->rounding.layer);
    for (int64_t p = 0; p < s->head_dim; p++)
        for (int64_t n = 0; n < dim; n += LANES) {
            int64_t element = first + p * dim + n;
            store_state_upto(s->state, s->state_dtype, slot * s->slot_stride + element, dim - n,
                             load(h, FLOAT32, p * padded + n), is_stochastic, key,
                             s->rounding.first_element + element);
        }
}

static void zero_outputs(const struct scan *s, int64_t begin, int64_t end, int64_t head,
                         int64_t heads) {
    for (int64_t t = begin; t < end; t++)
        memset(at_mut(s->out, s->x.dtype, (t * s->heads + head) * s->head_dim), 0,
               heads * s->head_dim * dtype_bytes(s->x.dtype));
}

// Memory of the calling thread, kept for its next call.
static struct work *scratch(const struct scan *s, int64_t heads) {
    static _Thread_local char *memory;
    static _Thread_local int64_t size;
    int64_t P = s->padded_head_dim, N = s->padded_state_dim;
    int64_t counts[] = {CHUNK * N, CHUNK * N,     CHUNK * CHUNK,          CHUNK * CHUNK, CHUNK * P,
                        CHUNK * P, CHUNK * P, heads * P * N};
    int64_t bytes = round_up(sizeof(struct work), 64);
    for (int i = 0; i < 8; i++) bytes += round_up(counts[i] * 4, 64);
    if (bytes > size) {
        free(memory);
        size = round_up(bytes, 4096);
        memory = aligned_alloc(4096, (size_t)size);
        if (memory == NULL) abort();
    }
    struct work *w = (struct work *)memory;
    float **parts[] = {&w->B, &w->C, &w->CB, &w->mix, &w->x, &w->inputs, &w->y, &w->h};
    char *next = memory + round_up(sizeof(struct work), 64);
    for (int i = 0; i < 8; i++) {
        *parts[i] = (float *)next;
        next += round_up(counts[i] * 4, 64);
    }
    return w;
}

static int64_t first_checkpoint(const struct scan *s, int64_t token) {
    int64_t low = 0, high = s->checkpoints;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (s->checkpoint_tokens[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void scan_row(const struct scan *s, int64_t row, int64_t first_head, int64_t last_head) {
    int64_t start = s->cu_seqlens[row], stop = s->cu_seqlens[row + 1];
    int64_t write_slot = s->write_slots[row];
    if (write_slot == 0) {
        zero_outputs(s, start, stop, first_head, last_head - first_head);
        return;
    }
    int64_t read_slot = s->has_initial_state[row] ? s->read_slots[row] : 0;
    int64_t checkpoint = first_checkpoint(s, start);
    struct work *w = scratch(s, last_head - first_head);
    for (int64_t begin = start, end;; begin = end) {
        end = min64(begin + CHUNK, stop);
        if (checkpoint < s->checkpoints) end = min64(end, s->checkpoint_tokens[checkpoint] + 1);
        int64_t after = first_checkpoint(s, end), loaded = -1;
        for (int64_t head = first_head; head < last_head; head++) {
            // A row of one chunk leaves no state behind: the heads share the nearest cache.
            bool is_first = begin == start, is_last = end == stop;
            int64_t place = is_first && is_last ? 0 : head - first_head;
            float *h = w->h + place * s->padded_head_dim * s->padded_state_dim;
            if (is_first) read_state(s, h, read_slot, head);
            if (begin < end) {
                int64_t group = s->group_of_head ? s->group_of_head[head]
                                                 : head / (s->heads / s->groups);
                if (group != loaded) load_group(s, w, loaded = group, begin, end - begin);
                scan_chunk(s, w, h, is_first && read_slot == 0, head, begin, end - begin);
            }
            for (int64_t e = checkpoint; e < after; e++)
                if (s->checkpoint_slots[e] != 0)
                    write_state(s, h, s->checkpoint_slots[e], head, row, end - 1);
            if (is_last) write_state(s, h, write_slot, head, row, end - 1);
        }
        checkpoint = after;
        if (end == stop) return;
    }
}

EXPORT void ssd_scan(const void *x, int64_t x_dtype, int64_t x_token, int64_t x_head,
                     const void *dt, int64_t dt_dtype, int64_t dt_token, const float *A,
                     const void *B, int64_t B_dtype, int64_t B_token, int64_t B_group,
                     const void *C, int64_t C_dtype, int64_t C_token, int64_t C_group,
                     const void *z, int64_t z_dtype, int64_t z_token, int64_t z_head,
                     void *state, int64_t state_dtype, int64_t slot_stride, void *out,
                     const int32_t *cu_seqlens, const int64_t *read_slots,
                     const int64_t *write_slots, const bool *has_initial_state, int64_t rows,
                     const float *D, const float *dt_bias, int64_t softplus, float least_step,
                     float greatest_step, const int64_t *group_of_head, int64_t tokens,
                     int64_t heads, int64_t groups, int64_t head_dim, int64_t state_dim,
                     const int64_t *checkpoint_tokens, const int64_t *checkpoint_slots,
                     int64_t checkpoints, const int64_t *seeds, const int64_t *positions,
                     int64_t layer, int64_t first_element) {
    struct scan s = {
        .tokens = tokens, .rows = rows, .heads = heads, .groups = groups, .head_dim = head_dim,
        .state_dim = state_dim, .checkpoints = checkpoints,
        .padded_head_dim = round_up(head_dim, LANES),
        .padded_state_dim = round_up(state_dim, LANES),
        .x = {x, (enum dtype)x_dtype, x_token, x_head},
        .dt = {dt, (enum dtype)dt_dtype, dt_token, 1},
        .B = {B, (enum dtype)B_dtype, B_token, B_group},
        .C = {C, (enum dtype)C_dtype, C_token, C_group},
        .z = {z, (enum dtype)z_dtype, z_token, z_head},
        .out = out, .state = state, .state_dtype = (enum dtype)state_dtype,
        .slot_stride = slot_stride, .A = A, .D = D, .dt_bias = dt_bias,
        .cu_seqlens = cu_seqlens, .read_slots = read_slots, .write_slots = write_slots,
        .group_of_head = group_of_head, .checkpoint_tokens = checkpoint_tokens,
        .checkpoint_slots = checkpoint_slots, .has_initial_state = has_initial_state,
        .rounding = {seeds, positions, layer, first_element},
        .softplus = softplus, .least_step = least_step, .greatest_step = greatest_step,
    };
    int64_t end = cu_seqlens[rows];
    zero_outputs(&s, 0, cu_seqlens[0], 0, heads);
    zero_outputs(&s, end, tokens, 0, heads);
    if (rows == 0) return;
    int64_t work = (end - cu_seqlens[0]) * heads * head_dim * state_dim;
    int64_t threads = work > PARALLEL_WORK ? omp_get_max_threads() : 1;
    int64_t blocks = threads == 1 ? 1 : min64(heads, (2 * threads + rows - 1) / rows);
#pragma omp parallel for collapse(2) schedule(dynamic) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++)
            scan_row(&s, row, heads * block / blocks, heads * (block + 1) / blocks);
}
