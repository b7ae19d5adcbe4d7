// The softmax statistics of rows of logits, and the gradient of their cross entropy, in place: two passes over memory.
// Between the two, ranks that hold blocks of the vocabulary can combine their statistics.

#pragma once

#include <omp.h>

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t PART = 64 * LANES;  // numbers that stay in the cache between their maximum and their sum

// Loads `count` numbers, and minus infinity for the rest of LANES.
INLINE floats load_some(const bf16* from, int64_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES];
    for (int i = 0; i < LANES; i++) some[i] = i < count ? from[i] : 0xff80;
    return load_bf16(some);
}

// Computes the maximum of each row of V numbers, `step` apart, and the sum of exp(x - maximum); for V = 0 minus
// infinity and zero.
void softmax_statistics(
    const bf16* logits, int64_t step, int64_t num_rows, int64_t size, float* row_maxima, float* sums
) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16* x = logits + row * step;
        float top = minus_infinity();
        floats total = {};
        for (int64_t start = 0; start < size; start += PART) {
            int64_t stop = start + PART < size ? start + PART : size;
            floats most = all(top);
            for (int64_t i = start; i < stop; i += LANES) most = maximum(load_some(x + i, stop - i), most);
            float higher = max_lane(most);
            if (higher > top) {
                total *= exponential(all(top - higher));
                top = higher;
            }
            const float base = top == minus_infinity() ? 0 : top;
            for (int64_t i = start; i < stop; i += LANES) total += exponential(load_some(x + i, stop - i) - base);
        }
        row_maxima[row] = top;
        sums[row] = sum(total);
    }
}

// Overwrites x by exp(x - maximum) * scale in each row, and by zero from `size` to `width`. Column targets[row] becomes
// at_targets[row], unless it is negative.
void softmax_gradient(
    bf16* logits, int64_t step, int64_t num_rows, int64_t size, int64_t width, const float* row_maxima,
    const float* scales, const int64_t* targets, const float* at_targets
) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        bf16* x = logits + row * step;
        const float top = row_maxima[row], scale = scales[row];
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store_bf16(x + i, exponential(load_bf16(x + i) - top) * scale);
        if (i < size) {
            shorts rest = narrow(exponential(load_some(x + i, size - i) - top) * scale);
            for (int lane = 0; i < size; i++, lane++) x[i] = rest[lane];
        }
        for (; i < width; i++) x[i] = 0;
        if (targets[row] >= 0) x[targets[row]] = narrow(at_targets[row]);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
