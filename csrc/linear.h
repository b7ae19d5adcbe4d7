// y = x w^T with a packed weight.
//
// Packed: blocks of up to 4 panels, whose pairs alternate, so that a block is read from its first byte to its last. The
// last panel is padded with zero columns.

#pragma once

#include <omp.h>

#include "tile.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int BLOCK_PANELS = 4;
constexpr int64_t WORDS_AHEAD = 2048;

struct Linear {
    const uint32_t* packed;
    int64_t num_columns, num_pairs;  // N and K / 2

    int64_t num_panels() const { return (num_columns + LANES - 1) / LANES; }
    int64_t block_panels(int64_t block) const {
        int64_t rest = num_panels() - block * BLOCK_PANELS;
        return rest < BLOCK_PANELS ? rest : BLOCK_PANELS;
    }
    const uint32_t* panel(int64_t number) const {
        int64_t block = number / BLOCK_PANELS;
        return packed + block * BLOCK_PANELS * LANES * num_pairs + number % BLOCK_PANELS * LANES;
    }
    int64_t step(int64_t number) const { return block_panels(number / BLOCK_PANELS) * LANES; }
};

// Packs weight [N, K] into whole panels.
void pack(const bf16* weight, int64_t num_columns, int64_t num_inner, bf16* packed) {
    Linear to{(const uint32_t*)packed, num_columns, num_inner / 2};
#pragma omp parallel for
    for (int64_t number = 0; number < to.num_panels(); number++) {
        uint32_t* panel = const_cast<uint32_t*>(to.panel(number));
        for (int64_t k = 0; k < to.num_pairs; k++)
            for (int lane = 0; lane < LANES; lane++) {
                int64_t column = number * LANES + lane;
                uint32_t pair = 0;
                if (column < num_columns) memcpy(&pair, weight + column * num_inner + 2 * k, 4);
                panel[k * to.step(number) + lane] = pair;
            }
    }
}

// Looks up rows of the weight, for an embedding that is tied to the output projection.
static void look_up(const int64_t* ids, int64_t num_ids, const Linear& w, bf16* y) {
#pragma omp parallel for if (num_ids > 1)
    for (int64_t i = 0; i < num_ids; i++) {
        const uint32_t* panel = w.panel(ids[i] / LANES) + ids[i] % LANES;
        const int64_t step = w.step(ids[i] / LANES);
        for (int64_t k = 0; k < w.num_pairs; k++) memcpy(y + 2 * (i * w.num_pairs + k), panel + k * step, 4);
    }
}

template <class Out>
INLINE void put(Out* to, floats v, int count) {
    Out whole[LANES];
    if constexpr (sizeof(Out) == 2)
        store_bf16(count == LANES ? to : whole, v);
    else
        store(count == LANES ? to : whole, v);
    if (count < LANES)
        for (int i = 0; i < count; i++) to[i] = whole[i];
}

// A bf16 residual, to which a product, rounded to bf16, is added.
struct Residual {
    bf16 value;
};

INLINE void put(Residual* to, floats v, int count) {
    bf16 whole[LANES] = {};
    bf16* sums = (bf16*)to;
    if (count < LANES) sums = (bf16*)memcpy(whole, to, count * sizeof(bf16));
    store_bf16(sums, load_bf16(sums) + widen(narrow(v)));
    if (count < LANES) memcpy(to, whole, count * sizeof(bf16));
}

// What a tile prefetches: `lines_each` cache lines from `start` for each pair that it reads.
struct LinesAhead {
    const uint32_t* start;
    int64_t lines_each;
};

template <class Out, int R, int P>
INLINE void linear_tile(
    const Linear& w, const uint32_t* rows, int64_t row_step, int64_t panel, Out* y, int64_t y_step, LinesAhead ahead
) {
    floats sums[R][P] = {};
    Panels<P> panels{{}, w.step(panel)};
    for (int p = 0; p < P; p++) panels.panel[p] = w.panel(panel + p);
    add_products(sums, rows, row_step, panels, w.num_pairs, [&](int64_t k) {
        for (int64_t i = 0; i < ahead.lines_each; i++)
            __builtin_prefetch(ahead.start + (k * ahead.lines_each + i) * LINE, 0, 2);
    });
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) {
            int64_t column = (panel + p) * LANES, rest = w.num_columns - column;
            put(y + r * y_step + column, sums[r][p], rest < LANES ? int(rest) : LANES);
        }
}

// The product of all rows and some panels of one block. With several tiles of rows, memory would be idle after the
// first one, so all tiles together prefetch the panels that follow, P lines per pair. A single tile is bound by memory
// and prefetches its own panels, a fixed distance ahead.
template <class Out, int P>
void linear_panels(
    const Linear& w, const uint32_t* x, int64_t x_step, int64_t num_rows, int64_t panel, Out* y, int64_t y_step
) {
    constexpr int64_t LINES = (P * LANES + LINE - 1) / LINE;
    int64_t tiles = num_tiles(num_rows), tile = 0, each = (LINES + tiles - 1) / tiles;
    const uint32_t* next = w.panel(panel) + (tiles > 1 ? w.num_pairs * w.step(panel) : WORDS_AHEAD);
    for_each_tile(num_rows, [&]<int R>(int64_t row) {
        LinesAhead ahead{next + tile * each * w.num_pairs * LINE, tile * each < LINES ? each : 0};
        linear_tile<Out, R, P>(w, x + row * x_step, x_step, panel, y + row * y_step, y_step, ahead);
        tile++;
    });
}

// x [M, K] bf16 with rows `x_step` numbers apart -> y [M, N]: one thread's share of the panels, in a parallel region.
template <class Out>
void linear_share(const bf16* x, int64_t x_step, int64_t num_rows, const Linear& w, Out* y, int64_t y_step) {
    const uint32_t* rows = (const uint32_t*)x;
    const int64_t row_step = x_step / 2, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t panel = part_start(w.num_panels(), threads, thread), stop = part_start(w.num_panels(), threads, thread + 1);
    while (panel < stop) {
        int64_t in_block = w.block_panels(panel / BLOCK_PANELS) - panel % BLOCK_PANELS;
        int64_t count = stop - panel < in_block ? stop - panel : in_block;
        if (count > TILE_PANELS) count = TILE_PANELS;
        with_constant<TILE_PANELS>(int(count), [&]<int P>() {
            linear_panels<Out, P>(w, rows, row_step, num_rows, panel, y, y_step);
        });
        panel += count;
    }
}

template <class Out>
void linear(const bf16* x, int64_t x_step, int64_t num_rows, const Linear& w, Out* y, int64_t y_step) {
    if (!num_rows) return;
#pragma omp parallel
    linear_share(x, x_step, num_rows, w, y, y_step);
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
