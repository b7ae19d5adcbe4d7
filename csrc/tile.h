// The product that all matrix products use: a tile of a few rows by a few panels, summed in registers.
//
// A panel is LANES columns of a matrix, in pairs of bf16 along the summed dimension: the pairs k of all columns fill
// one register. Each sum has its own lane, to which its pairs are added from the first to the last. So the bits of a
// row do not depend on the other rows and panels of the tile: products are batch-invariant.

#pragma once

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

#if SHARDWISE_AVX512
constexpr int TILE_ROWS = 6, TILE_PANELS = 4;  // 24 of 32 registers hold sums
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 2;  // 8 of 16
#endif

constexpr int64_t LINE = 16;  // pairs per cache line

// P panels; pair k of panel p is at panel[p][k * step].
template <int P>
struct Panels {
    const uint32_t* panel[P];
    int64_t step;
};

struct NoPrefetch {
    INLINE void operator()(int64_t) const {}
};

// Adds the products of R rows and P panels to `sums`. Pair k of row r is at rows[r * row_step + k * pair_step].
// prefetch(k) is called while pair k is read.
template <int R, int P, class Prefetch>
INLINE void add_products(
    floats (&sums)[R][P], const uint32_t* rows, int64_t row_step, const Panels<P>& panels, int64_t num_pairs,
    Prefetch&& prefetch, int64_t pair_step = 1
) {
    for (int64_t k = 0; k < num_pairs; k++) {
        words w[P];
        for (int p = 0; p < P; p++) w[p] = load<uint32_t, words>(panels.panel[p] + k * panels.step);
        prefetch(k);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sums[r][p] = add_pairs(sums[r][p], rows[r * row_step + k * pair_step], w[p]);
    }
}

// Calls work<min(n, N)>(), which turns a number known at run time into a constant.
template <int N, class Work>
INLINE void with_constant(int n, Work&& work) {
    if constexpr (N > 1) {
        if (n < N) return with_constant<N - 1>(n, work);
    }
    work.template operator()<N>();
}

// The start of part `number` of `parts` even parts.
INLINE int64_t part_start(int64_t total, int64_t parts, int64_t number) { return total * number / parts; }

template <int N = TILE_ROWS>
INLINE int64_t num_tiles(int64_t num_rows) {
    return (num_rows + N - 1) / N;
}

// Calls work<R>(first row) for all rows, in even tiles of at most N rows.
template <int N = TILE_ROWS, class Work>
INLINE void for_each_tile(int64_t num_rows, Work&& work) {
    int64_t parts = num_tiles<N>(num_rows);
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = part_start(num_rows, parts, part), stop = part_start(num_rows, parts, part + 1);
        with_constant<N>(int(stop - row), [&]<int R>() { work.template operator()<R>(row); });
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
