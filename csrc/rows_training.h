// Row-wise operations of training, forward and backward: norm, gated activation, RoPE. Each is one pass over memory.
// The gradient of a norm's weight, a sum over rows, is summed by fixed blocks of rows, so it does not depend on the
// threads.

#pragma once

#include <omp.h>

#include <vector>

#include "rows.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t ROW_BLOCK = 64;

// Rows of D numbers: `rows_per_token` contiguous ones in each of `num_tokens` tokens, `step` numbers apart.
struct TokenRows {
    const bf16* start;
    int64_t step, num_tokens, rows_per_token, size;

    int64_t count() const { return num_tokens * rows_per_token; }
    const bf16* row(int64_t number) const {
        return start + number / rows_per_token * step + number % rows_per_token * size;
    }
};

// Calls whole(i) for every LANES numbers of [0, size), then single(i) for each of the rest.
template <class Whole, class Single>
INLINE void for_each_number(int64_t size, Whole&& whole, Single&& single) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) whole(i);
    for (; i < size; i++) single(i);
}

// y = rms_norm(x); scales: the reciprocal root mean square of each row.
void norm_forward(
    const bf16* from, int64_t step, int64_t num_tokens, int64_t rows_per_token, int64_t size, const bf16* weight,
    float eps, bf16* y, float* scales
) {
    const TokenRows x{from, step, num_tokens, rows_per_token, size};
#pragma omp parallel for if (x.count() * size > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < x.count(); row++)
        scales[row] = norm_row(x.row(row), size, weight, eps, y + row * size);
}

// With n = x scale and g = dy weight: dx = scale (g - n mean(g n)); adds dy n to d_weight.
static void norm_row_backward(
    const bf16* x, const bf16* weight, float scale, const bf16* dy, int64_t size, bf16* dx, float* d_weight
) {
    floats products = {};
    float total = 0;
    for_each_number(
        size,
        [&](int64_t i) {
            floats n = load_bf16(x + i) * scale, d = load_bf16(dy + i);
            store(d_weight + i, multiply_add(d, n, load(d_weight + i)));
            products = multiply_add(d * load_bf16(weight + i), n, products);
        },
        [&](int64_t i) {
            float n = widen(x[i]) * scale, d = widen(dy[i]);
            d_weight[i] += d * n;
            total += d * widen(weight[i]) * n;
        }
    );
    float mean = (total + sum(products)) / float(size);
    for_each_number(
        size,
        [&](int64_t i) {
            floats n = load_bf16(x + i) * scale, g = load_bf16(dy + i) * load_bf16(weight + i);
            store_bf16(dx + i, (g - n * mean) * scale);
        },
        [&](int64_t i) {
            float n = widen(x[i]) * scale, g = widen(dy[i]) * widen(weight[i]);
            dx[i] = narrow((g - n * mean) * scale);
        }
    );
}

void norm_backward(
    const bf16* from, int64_t step, int64_t num_tokens, int64_t rows_per_token, int64_t size, const bf16* weight,
    const float* scales, const bf16* dy, bf16* dx, bf16* d_weight
) {
    const TokenRows x{from, step, num_tokens, rows_per_token, size};
    const int64_t num_rows = x.count(), num_blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    std::vector<float> sums((num_blocks + 1) * size);
#pragma omp parallel for if (num_rows * size > PARALLEL_NUMBERS)
    for (int64_t block = 0; block < num_blocks; block++) {
        int64_t first = block * ROW_BLOCK, rest = num_rows - first;
        for (int64_t row = first; row < first + (rest < ROW_BLOCK ? rest : ROW_BLOCK); row++) {
            const int64_t at = row * size;
            norm_row_backward(x.row(row), weight, scales[row], dy + at, size, dx + at, sums.data() + block * size);
        }
    }
    float* total = sums.data() + num_blocks * size;
    for (int64_t block = 0; block < num_blocks; block++)
        for (int64_t i = 0; i < size; i++) total[i] += sums[block * size + i];
    for (int64_t i = 0; i < size; i++) d_weight[i] = narrow(total[i]);
}

// The gradient of silu(gate) up, in rows [gate | up] of 2 F numbers. F is a multiple of LANES.
void gated_silu_backward(const bf16* x, const bf16* dy, int64_t num_rows, int64_t size, bf16* dx) {
#pragma omp parallel for if (num_rows * size > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *gate = x + row * 2 * size, *up = gate + size;
        bf16 *d_gate = dx + row * 2 * size, *d_up = d_gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            floats g = load_bf16(gate + i), d = load_bf16(dy + row * size + i);
            floats s = sigmoid(g);
            store_bf16(d_gate + i, d * load_bf16(up + i) * s * (1.0f + g * (1.0f - s)));
            store_bf16(d_up + i, d * (g * s));
        }
    }
}

// RoPE on heads of C numbers (kernels/reference/rope.py), or its inverse with direction -1. Token i has the angles
// i % num_angles of cos and sin [num_angles, C / 2]; C is a multiple of 2 LANES.
void rotate(
    const bf16* from, int64_t step, int64_t num_tokens, int64_t num_heads, int64_t size, const bf16* cos,
    const bf16* sin, int64_t num_angles, float direction, bf16* y
) {
    const TokenRows x{from, step, num_tokens, num_heads, size};
    const int64_t half = size / 2;
#pragma omp parallel for if (x.count() * size > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < x.count(); row++) {
        const int64_t angle = row / num_heads % num_angles * half;
        const bf16* head = x.row(row);
        bf16* to = y + row * size;
        for (int64_t i = 0; i < half; i += LANES) {
            floats a = load_bf16(head + i), b = load_bf16(head + half + i);
            floats c = load_bf16(cos + angle + i), s = load_bf16(sin + angle + i) * direction;
            store_bf16(to + i, a * c - b * s);
            store_bf16(to + half + i, b * c + a * s);
        }
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
