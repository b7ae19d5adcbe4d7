// Row-wise operations: norm and gated activation, each in one pass over memory.

#pragma once

#include <omp.h>

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t PARALLEL_NUMBERS = 1 << 13;  // fewer are computed faster than threads start

// y = round(x / rms(x)) weight, with the mean square over D in fp32 (kernels/reference/norm.py), for any D. Returns
// 1 / rms(x).
INLINE float norm_row(const bf16* from, int64_t size, const bf16* weight, float eps, bf16* to) {
    int64_t whole = size / LANES * LANES;
    floats squares = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load_bf16(from + i);
        squares = multiply_add(v, v, squares);
    }
    float total = sum(squares);
    for (int64_t i = whole; i < size; i++) total += widen(from[i]) * widen(from[i]);
    float scale = 1 / __builtin_sqrtf(total / float(size) + eps);
    for (int64_t i = 0; i < whole; i += LANES)
        store_bf16(to + i, widen(narrow(load_bf16(from + i) * scale)) * load_bf16(weight + i));
    for (int64_t i = whole; i < size; i++) to[i] = narrow(widen(narrow(widen(from[i]) * scale)) * widen(weight[i]));
    return scale;
}

void rms_norm(const bf16* x, int64_t x_step, int64_t num_rows, int64_t size, const bf16* weight, float eps, bf16* y) {
#pragma omp parallel for if (num_rows * size > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) norm_row(x + row * x_step, size, weight, eps, y + row * size);
}

INLINE floats sigmoid(floats x) { return select(x < -88.0f, floats{}, 1.0f / (1.0f + exponential(-x))); }

// silu(gate) up of a row [gate | up], each of F numbers (kernels/reference/gated.py).
INLINE void gated_row(const bf16* gate, int64_t size, bf16* to) {
    const bf16* up = gate + size;
    for (int64_t i = 0; i < size; i += LANES) {
        floats g = load_bf16(gate + i);
        floats silu = widen(narrow(g * sigmoid(g)));
        store_bf16(to + i, silu * load_bf16(up + i));
    }
}

void gated_silu(const bf16* x, int64_t num_rows, int64_t size, bf16* y) {
#pragma omp parallel for if (num_rows * size > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) gated_row(x + row * 2 * size, size, y + row * size);
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
