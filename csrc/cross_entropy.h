// Rows of logits -> their softmax's statistics, and then, in place, the gradient that cross entropy gives them: two
// passes over memory. Between them ranks that each hold a block of the vocabulary can put their statistics together.

#pragma once

#include <omp.h>

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t PART = 64 * LANES;  // numbers that a cache holds between finding their highest and their sum

// LANES numbers, of which `count` are there; the others are minus infinity.
INLINE floats load_some(const bf16* from, int64_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES];
    for (int i = 0; i < LANES; i++) some[i] = i < count ? from[i] : 0xff80;
    return load_bf16(some);
}

// The highest of each row of V numbers, `step` apart, and the sum of exp(x - highest); without any, minus infinity and
// zero.
void softmax_statistics(
    const bf16* logits, int64_t step, int64_t num_rows, int64_t size, float* highests, float* sums
) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16* x = logits + row * step;
        float top = lowest();
        floats total = {};
        for (int64_t start = 0; start < size; start += PART) {
            int64_t stop = start + PART < size ? start + PART : size;
            floats most = all(top);
            for (int64_t i = start; i < stop; i += LANES) most = larger(load_some(x + i, stop - i), most);
            float higher = highest(most);
            if (higher > top) {
                total *= exponential(all(top - higher));
                top = higher;
            }
            const float base = top == lowest() ? 0 : top;
            for (int64_t i = start; i < stop; i += LANES) total += exponential(load_some(x + i, stop - i) - base);
        }
        highests[row] = top;
        sums[row] = sum(total);
    }
}

// x -> exp(x - highest) share in each row; zero from `size` to `width`. At number targets[row], if that is not
// negative, at_targets[row] takes its place.
void softmax_gradient(
    bf16* logits, int64_t step, int64_t num_rows, int64_t size, int64_t width, const float* highests,
    const float* shares, const int64_t* targets, const float* at_targets
) {
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        bf16* x = logits + row * step;
        const float top = highests[row], share = shares[row];
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store_bf16(x + i, exponential(load_bf16(x + i) - top) * share);
        if (i < size) {
            shorts rest = narrow(exponential(load_some(x + i, size - i) - top) * share);
            for (int lane = 0; i < size; i++, lane++) x[i] = rest[lane];
        }
        for (; i < width; i++) x[i] = 0;
        if (targets[row] >= 0) x[targets[row]] = narrow(at_targets[row]);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
