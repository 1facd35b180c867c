// selective_state_update; arguments as in op.py. B batch, H heads, G groups, P head dim, N state dim.
//
// The states are most of what a decode step moves, so each is read and written once, in place, in
// the order of memory: decay, input, output, skip and gate are all of one pass.
#include <stdlib.h>

#include "rounding.h"

#define ROWS 4  // rows of a state that go through N together: they share loads of B and C

struct update {
    const void *x, *dt, *B, *C, *z;
    int64_t x_stride, dt_stride, B_stride, C_stride, z_stride;  // between rows of the batch
    const float *A, *D, *dt_bias;
    bool A_by_state;  // A is (H, N), not (H)
    const void *state;
    int64_t slot_stride;
    const int64_t *read_slots, *write_slots, *group_of_head;
    int64_t batch, heads, groups, head_dim, state_dim;
    bool dt_softplus;
    float dt_least, dt_most;
    void *out;
    struct rounding rounding;
};

// The constants of a compiled variant.
struct formats {
    enum dtype activation, state;
    bool A_by_state, is_stochastic, is_fresh;
};

INLINE float step_size(const struct update *u, enum dtype dtype, int64_t row, int64_t head) {
    float step = load_one(u->dt, dtype, row * u->dt_stride + head);
    if (u->dt_bias) step += u->dt_bias[head];
    if (u->dt_softplus) step = softplus(step);
    return fminf(fmaxf(step, u->dt_least), u->dt_most);
}

// Rows p to p + rows of the state of one head. B, C and decay are floats of N elements.
INLINE void advance_rows(const struct update *u, struct formats f, int rows, const void *old,
                         void *state, const float *inputs, float decay, const float *decays,
                         const float *B, const float *C, float *y, uint32_t key,
                         int64_t first_element) {
    int64_t N = u->state_dim;
    vf sums[ROWS] = {{0}};
    for (int64_t n = 0; n < N; n += LANES) {
        int64_t count = N - n;
        vf b = load(B, FLOAT32, n), c = load(C, FLOAT32, n);
        vf a = f.A_by_state ? load(decays, FLOAT32, n) : splat(decay);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int64_t at_row = r * N + n;
            vf h = b * inputs[r];
            if (!f.is_fresh) {
                prefetch(at(old, f.state, at_row + ROWS * N));
                h += a * load_upto(old, f.state, at_row, count);
            }
            sums[r] += h * c;
            store_state_upto(state, f.state, at_row, count, h, f.is_stochastic, key,
                             first_element + at_row);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) y[r] = hsum(sums[r]);
}

// B and C of one group as floats, filled up with zeros to a multiple of LANES.
INLINE void widen(const void *source, enum dtype dtype, int64_t index, int64_t N, float *wide) {
    for (int64_t n = 0; n < N; n += LANES)
        store(wide, FLOAT32, n, load_upto(source, dtype, index + n, N - n));
}

INLINE void advance_head(const struct update *u, struct formats f, int64_t row, int64_t head,
                         const float *B, const float *C, float *decays) {
    int64_t P = u->head_dim, N = u->state_dim, unit = head * P * N;
    const void *old = at(u->state, f.state, u->read_slots[row] * u->slot_stride + unit);
    void *state = at_mut((void *)u->state, f.state, u->write_slots[row] * u->slot_stride + unit);
    float step = step_size(u, f.activation, row, head), decay = 0;
    if (f.A_by_state)
        for (int64_t n = 0; n < N; n += LANES)
            store(decays, FLOAT32, n,
                  vexp(step * load_upto(u->A + head * N, FLOAT32, n, N - n)));
    else
        decay = expf(step * u->A[head]);
    uint32_t key = 0;
    if (f.is_stochastic)
        key = row_key(u->rounding.seeds[row], u->rounding.positions[row], u->rounding.layer);
    for (int64_t p = 0; p < P; p += ROWS) {
        int64_t rows = min64(ROWS, P - p), first = u->rounding.first_element + unit + p * N;
        float x[ROWS], inputs[ROWS], y[ROWS];
        for (int64_t r = 0; r < rows; r++) {
            x[r] = load_one(u->x, f.activation, row * u->x_stride + head * P + p + r);
            inputs[r] = step * x[r];
        }
        const void *old_rows = at(old, f.state, p * N);
        void *new_rows = at_mut(state, f.state, p * N);
        if (rows == ROWS)
            advance_rows(u, f, ROWS, old_rows, new_rows, inputs, decay, decays, B, C, y, key,
                         first);
        else
            for (int64_t r = 0; r < rows; r++)
                advance_rows(u, f, 1, at(old_rows, f.state, r * N),
                             at_mut(new_rows, f.state, r * N), inputs + r, decay, decays, B, C,
                             y + r, key, first + r * N);
        for (int64_t r = 0; r < rows; r++) {
            if (u->D) y[r] += u->D[head] * x[r];
            if (u->z) {
                float z = load_one(u->z, f.activation, row * u->z_stride + head * P + p + r);
                y[r] *= z / (1.0f + expf(-z));
            }
            store_one(u->out, f.activation, (row * u->heads + head) * P + p + r, y[r]);
        }
    }
}

// Heads of one row that share a group go to one thread, or each to its own if threads are many.
INLINE void advance_all(const struct update *u, struct formats f) {
    int64_t N = (u->state_dim + LANES - 1) / LANES * LANES, P = u->head_dim;
#pragma omp parallel if (u->batch * u->heads * P * N > 1 << 15)
    {
        float *B = aligned_alloc(64, (size_t)(3 * N * 4 + 63) & ~(size_t)63);
        float *C = B + N, *decays = C + N;
        int64_t wide_row = -1, wide_group = -1;
#pragma omp for collapse(2) schedule(static)
        for (int64_t row = 0; row < u->batch; row++)
            for (int64_t head = 0; head < u->heads; head++) {
                if (u->write_slots[row] == 0) {
                    for (int64_t p = 0; p < P; p++)
                        store_one(u->out, f.activation, (row * u->heads + head) * P + p, 0.0f);
                    continue;
                }
                int64_t group = u->group_of_head ? u->group_of_head[head]
                                                 : head / (u->heads / u->groups);
                if (row != wide_row || group != wide_group) {
                    widen(u->B, f.activation, row * u->B_stride + group * u->state_dim,
                          u->state_dim, B);
                    widen(u->C, f.activation, row * u->C_stride + group * u->state_dim,
                          u->state_dim, C);
                    wide_row = row;
                    wide_group = group;
                }
                f.is_fresh = u->read_slots[row] == 0;
                if (f.is_fresh) {
                    f.is_fresh = true;
                    advance_head(u, f, row, head, B, C, decays);
                } else {
                    f.is_fresh = false;
                    advance_head(u, f, row, head, B, C, decays);
                }
            }
        free(B);
    }
}

static void choose_formats(const struct update *u, int64_t activation, int64_t state) {
    bool is_stochastic = u->rounding.seeds != NULL && state != FLOAT32;
#define CASE(ACTIVATION, STATE, BY_STATE, STOCHASTIC)                                          \
    if (activation == ACTIVATION && state == STATE && u->A_by_state == BY_STATE &&             \
        is_stochastic == STOCHASTIC)                                                           \
        return advance_all(u, (struct formats){ACTIVATION, STATE, BY_STATE, STOCHASTIC, false});
#define STATES(ACTIVATION, BY_STATE)                                                           \
    CASE(ACTIVATION, FLOAT32, BY_STATE, false)                                                 \
    CASE(ACTIVATION, BFLOAT16, BY_STATE, false)                                                \
    CASE(ACTIVATION, BFLOAT16, BY_STATE, true)                                                 \
    CASE(ACTIVATION, FLOAT16, BY_STATE, false)                                                 \
    CASE(ACTIVATION, FLOAT16, BY_STATE, true)
    STATES(FLOAT32, false)
    STATES(FLOAT32, true)
    STATES(BFLOAT16, false)
    STATES(BFLOAT16, true)
    STATES(FLOAT16, false)
    STATES(FLOAT16, true)
}

EXPORT void selective_state_update(
    const void *x, int64_t x_stride, const void *dt, int64_t dt_stride, const float *A,
    int64_t A_by_state, const void *B, int64_t B_stride, const void *C, int64_t C_stride,
    const void *z, int64_t z_stride, const float *D, const float *dt_bias, void *state,
    int64_t slot_stride, const int64_t *read_slots, const int64_t *write_slots,
    const int64_t *group_of_head, int64_t batch, int64_t heads, int64_t groups, int64_t head_dim,
    int64_t state_dim, int64_t dt_softplus, float dt_least, float dt_most, void *out,
    int64_t activation, int64_t state_dtype, const int64_t *seeds, const int64_t *positions,
    int64_t layer, int64_t first_element) {
    struct update u = {x, dt, B, C, z, x_stride, dt_stride, B_stride, C_stride, z_stride,
                       A, D, dt_bias, A_by_state != 0, state, slot_stride, read_slots,
                       write_slots, group_of_head, batch, heads, groups, head_dim, state_dim,
                       dt_softplus != 0, dt_least, dt_most, out,
                       {seeds, positions, layer, first_element}};
    choose_formats(&u, activation, state_dtype);
}
