// y = x w^T with a packed weight of small integers and activations that are quantized dynamically to int8, with a scale
// per stretch of 32 (defined in quant/dynamic.py):
//
//     y = sum over stretches of  sx (sw (q - middle) . qx  +  offset sum(qx))
//
// Sums of integer products are exact in any order; after every stretch they are added to a float, each in its own lane.
// So products are batch-invariant, as in tile.h.
//
// Packed: blocks of two panels (the last may have one). A block stores its groups of columns in order, each with its
// codes, scales and offsets, so that it is read from its first byte to its last. Codes are whole stretches: fours of
// neighbouring codes, one four per column, fill a register. With 4 bits a register holds one four in its low halves and
// the next in its high halves. Missing columns are zeros.

#pragma once

#include <omp.h>

#include <cmath>
#include <memory>

#include "linear.h"
#include "scales.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int STRETCH = 32;  // activations that share a scale
constexpr int FOURS = STRETCH / 4;
constexpr int QUANTIZED_PANELS = 2;
constexpr int64_t BYTES_AHEAD = 8192;  // the fastest of 2, 4 and 8 KiB: it reads at the speed of memory
#if SHARDWISE_AVX512
constexpr int QUANTIZED_ROWS = 6;  // 24 of 32 registers hold sums, of integers and of floats
#else
constexpr int QUANTIZED_ROWS = 2;
#endif

INLINE int64_t stretches_of(int64_t num_inner) { return (num_inner + STRETCH - 1) / STRETCH; }

struct QuantizedLinear {
    const uint8_t* packed;
    QuantizedShape shape;

    int64_t num_panels() const { return (shape.num_columns + LANES - 1) / LANES; }
    int64_t num_blocks() const { return (num_panels() + QUANTIZED_PANELS - 1) / QUANTIZED_PANELS; }
    int64_t block_panels(int64_t block) const {
        int64_t rest = num_panels() - block * QUANTIZED_PANELS;
        return rest < QUANTIZED_PANELS ? rest : QUANTIZED_PANELS;
    }
    // Bytes per panel: a stretch of codes, and the scales and offsets of a group.
    int64_t stretch_bytes() const { return STRETCH * LANES * shape.bits / 8; }
    int64_t scale_bytes() const { return LANES * shape.scale_bytes(); }
    int64_t offset_bytes() const { return LANES * shape.offset_bytes(); }
    int64_t num_stretches() const { return stretches_of(shape.num_inner); }
    int64_t group_stretches() const { return shape.group ? shape.group / STRETCH : num_stretches(); }
    int64_t num_groups() const { return num_stretches() / group_stretches(); }
    int64_t group_bytes() const { return group_stretches() * stretch_bytes() + scale_bytes() + offset_bytes(); }
    const uint8_t* block(int64_t number) const {
        return packed + number * QUANTIZED_PANELS * group_bytes() * num_groups();
    }
};

// -- packing -------------------------------------------------------------------------------------------------

// Packs codes [N, bytes of a row], scales and offsets [N, G].
static void pack_quantized(
    const uint8_t* codes, const uint8_t* scales, const uint8_t* offsets, const QuantizedLinear& to
) {
    const QuantizedShape& shape = to.shape;
    const int64_t row_bytes = (shape.num_inner * shape.bits + 7) / 8, num_groups = to.num_groups();
    auto code = [&](int64_t column, int64_t k) -> uint8_t {
        if (column >= shape.num_columns || k >= shape.num_inner) return 0;
        const uint8_t* row = codes + column * row_bytes;
        if (shape.bits == 4) return k % 2 ? row[k / 2] >> 4 : row[k / 2] & 15;
        return uint8_t(row[k] + (shape.middle == 128 ? 128 : 0));  // signed when stored
    };
#pragma omp parallel for
    for (int64_t number = 0; number < to.num_blocks(); number++) {
        const int64_t panels = to.block_panels(number);
        uint8_t* at = const_cast<uint8_t*>(to.block(number));
        auto write_group = [&](const uint8_t* from, int64_t bytes, int64_t group) {
            for (int64_t lane = 0; lane < panels * LANES; lane++, at += bytes) {
                int64_t column = number * QUANTIZED_PANELS * LANES + lane;
                if (column < shape.num_columns)
                    memcpy(at, from + (column * num_groups + group) * bytes, bytes);
                else
                    memset(at, 0, bytes);
            }
        };
        for (int64_t group = 0; group < num_groups; group++) {
            for (int64_t stretch = 0; stretch < to.group_stretches(); stretch++)
                for (int64_t panel = 0; panel < panels; panel++) {
                    int64_t column = (number * QUANTIZED_PANELS + panel) * LANES;
                    int64_t k = (group * to.group_stretches() + stretch) * STRETCH;
                    for (int64_t four = 0; four < to.stretch_bytes() / (4 * LANES); four++)
                        for (int64_t lane = 0; lane < LANES; lane++)
                            for (int64_t i = 0; i < 4; i++, at++)
                                *at = shape.bits == 8
                                    ? code(column + lane, k + 4 * four + i)
                                    : code(column + lane, k + 8 * four + i) |
                                          code(column + lane, k + 8 * four + 4 + i) << 4;
                }
            write_group(scales, shape.scale_bytes(), group);
            if (offsets) write_group(offsets, shape.offset_bytes(), group);
        }
    }
}

// Looks up dequantized rows of the weight, rounded once, for an embedding that is tied to the output projection.
static void look_up_quantized(const int64_t* ids, int64_t num_ids, const QuantizedLinear& w, bf16* y) {
    const QuantizedShape& shape = w.shape;
#pragma omp parallel for if (num_ids > 1)
    for (int64_t i = 0; i < num_ids; i++) {
        const int64_t column = ids[i] % (QUANTIZED_PANELS * LANES), block = ids[i] / (QUANTIZED_PANELS * LANES);
        const int64_t panel = column / LANES, lane = column % LANES, panels = w.block_panels(block);
        const uint8_t* at = w.block(block);
        bf16* to = y + i * shape.num_inner;
        for (int64_t group = 0; group < w.num_groups(); group++) {
            const uint8_t* scales_at = at + w.group_stretches() * panels * w.stretch_bytes();
            const uint8_t* offsets = scales_at + panels * w.scale_bytes() + panel * w.offset_bytes();
            const float scale = load_scales(scales_at + panel * w.scale_bytes(), shape.scale_kind)[lane];
            float offset = 0;
            if (w.offset_bytes()) offset = load_offsets(offsets, shape.offset_kind, shape.scale_kind, all(scale))[lane];
            for (int64_t k = 0; k < w.group_stretches() * STRETCH; k++) {
                int64_t inner = group * w.group_stretches() * STRETCH + k, four = k % STRETCH / 4;
                if (inner >= shape.num_inner) break;
                const uint8_t* codes = at + (k / STRETCH * panels + panel) * w.stretch_bytes();
                int64_t word = (shape.bits == 4 ? four / 2 : four) * LANES + lane;
                int code = codes[word * 4 + k % 4];
                if (shape.bits == 4) code = four % 2 ? code >> 4 : code & 15;
                to[inner] = narrow(std::fma(float(code - shape.middle), scale, offset));
            }
            at = scales_at + panels * (w.scale_bytes() + w.offset_bytes());
        }
    }
}

// -- activations -----------------------------------------------------------------------------------------------

// A stretch of the rows of a tile, with the fours of all rows side by side, so that a tile reads one piece of memory;
// and for each row its scale, the start of its integer sums (-middle times the sum of its codes), and the sum of its
// codes times the scale.
struct Stretch {
    int8_t fours[FOURS][QUANTIZED_ROWS][4];
    float scales[QUANTIZED_ROWS];
    int32_t starts[QUANTIZED_ROWS];
    float scaled_sums[QUANTIZED_ROWS];
};

// Rows of activations in the order of tiles: [tiles, stretches].
struct Rows {
    Stretch* stretches;
    int64_t num_rows, num_stretches;

    static int64_t count(int64_t num_rows, int64_t num_stretches) {
        return num_tiles<QUANTIZED_ROWS>(num_rows) * num_stretches;
    }
    const Stretch* tile(int64_t number) const { return stretches + number * num_stretches; }
};

constexpr float LARGEST_CODE = 127, LEAST_SCALED = 0x1p-100f;

// Quantizes `count` numbers of a stretch; the rest are zeros.
INLINE void quantize_stretch(const bf16* x, int64_t count, int middle, Stretch& to, int row) {
    constexpr int PARTS = STRETCH / LANES;
    bf16 whole[STRETCH] = {};
    if (count < STRETCH) x = (const bf16*)memcpy(whole, x, count * 2);
    floats v[PARTS], most = {};
    ints broken = {};
    for (int i = 0; i < PARTS; i++) {
        v[i] = load_bf16(x + i * LANES);
        broken |= v[i] != v[i];
        most = maximum((floats)((words)v[i] & 0x7fffffffu), most);
    }
    float largest = lane_mask(broken) ? __builtin_nanf("") : max_lane(most), inverse = 0, scale = 0;
    if (!(largest < LEAST_SCALED)) inverse = LARGEST_CODE / largest, scale = largest / LARGEST_CODE;
    ints total = {};
    int8_t codes[STRETCH];
    for (int i = 0; i < PARTS; i++) {
        ints code = round_to_int(v[i] * inverse);
        store(codes + i * LANES, __builtin_convertvector(code, signed_bytes));
        total += code;
    }
    for (int four = 0; four < FOURS; four++) memcpy(to.fours[four][row], codes + four * 4, 4);
    const int32_t sum = sum_ints(total);
    to.scales[row] = scale;
    to.starts[row] = -middle * sum;
    to.scaled_sums[row] = scale * float(sum);
}

// Quantizes one thread's share of the columns of x [M, K], in a parallel region.
static void quantize_share(const bf16* x, int64_t x_step, int64_t num_inner, int middle, Rows& to) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t stop = part_start(to.num_stretches, threads, thread + 1);
    int64_t tile = 0;
    for_each_tile<QUANTIZED_ROWS>(to.num_rows, [&]<int R>(int64_t row) {
        for (int64_t i = part_start(to.num_stretches, threads, thread); i < stop; i++) {
            int64_t rest = num_inner - i * STRETCH;
            for (int r = 0; r < R; r++)
                quantize_stretch(
                    x + (row + r) * x_step + i * STRETCH, rest < STRETCH ? rest : STRETCH, middle,
                    to.stretches[tile * to.num_stretches + i], r
                );
        }
        tile++;
    });
}

// Quantizes row `number` of M.
static void quantize_row(const bf16* x, int64_t num_inner, int middle, Rows& to, int64_t number) {
    const int64_t tiles = num_tiles<QUANTIZED_ROWS>(to.num_rows);
    int64_t tile = number * tiles / to.num_rows;
    while (part_start(to.num_rows, tiles, tile + 1) <= number) tile++;
    const int row = int(number - part_start(to.num_rows, tiles, tile));
    for (int64_t i = 0; i < to.num_stretches; i++) {
        int64_t rest = num_inner - i * STRETCH;
        Stretch& stretch = to.stretches[tile * to.num_stretches + i];
        quantize_stretch(x + i * STRETCH, rest < STRETCH ? rest : STRETCH, middle, stretch, row);
    }
}

// -- products ----------------------------------------------------------------------------------------------

// Computes one stretch of R rows and P panels. `codes` are those of the first panel; the other panels follow.
template <int BITS, int R, int P>
INLINE void add_stretch(ints (&dots)[R][P], const uint8_t* codes, const Stretch& x) {
    constexpr int STEP = STRETCH * BITS / 8 / 4;  // words per lane
    const uint32_t* from = (const uint32_t*)codes;
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) dots[r][p] = ints{} + x.starts[r];
#pragma GCC unroll 8
    for (int four = 0; four < FOURS; four++) {
        words w[P];
        for (int p = 0; p < P; p++) {
            if constexpr (BITS == 8) {
                w[p] = load<uint32_t, words>(from + (p * STEP + four) * LANES);
            } else {
                w[p] = load<uint32_t, words>(from + (p * STEP + four / 2) * LANES);
                w[p] = (four % 2 ? w[p] >> 4 : w[p]) & 0x0f0f0f0fu;
            }
        }
        for (int r = 0; r < R; r++) {
            uint32_t codes_of_x;
            memcpy(&codes_of_x, x.fours[four][r], 4);
            for (int p = 0; p < P; p++) dots[r][p] = dot_fours(dots[r][p], w[p], codes_of_x);
        }
    }
}

// What a tile prefetches: `each` bytes for each stretch that it reads.
struct BytesAhead {
    const uint8_t* start;
    int64_t each;
};

// The scales and offsets of one group.
template <int P>
struct Group {
    floats scales[P], offsets[P];

    INLINE Group(const QuantizedLinear& w, const uint8_t* scales_at) {
        for (int p = 0; p < P; p++) {
            scales[p] = load_scales(scales_at + p * w.scale_bytes(), w.shape.scale_kind);
            offsets[p] = floats{};
            if (w.offset_bytes())
                offsets[p] = load_offsets(
                    scales_at + P * w.scale_bytes() + p * w.offset_bytes(), w.shape.offset_kind,
                    w.shape.scale_kind, scales[p]
                );
        }
    }
};

// GROUPED: rows have several scales, so each stretch is scaled separately; otherwise a row is scaled at its end.
template <int BITS, bool GROUPED, class Out, int R, int P>
INLINE void quantized_tile(
    const QuantizedLinear& w, const Stretch* x, int64_t block, Out* y, int64_t y_step, BytesAhead ahead
) {
    const int64_t bytes = P * w.stretch_bytes(), group_stretches = w.group_stretches(), num_groups = w.num_groups();
    const bool has_offsets = w.offset_bytes();
    const uint8_t* at = w.block(block);
    const uint8_t* next = ahead.start;
    floats sums[R][P] = {};
    for (int64_t number = 0; number < num_groups; number++) {
        const uint8_t* scales_at = at + group_stretches * bytes;
        Group<P> group(w, scales_at);
        for (int64_t i = 0; i < group_stretches; i++, at += bytes, x++) {
            for (int64_t line = 0; line < ahead.each; line += 64) __builtin_prefetch(next + line, 0, 2);
            next += ahead.each;
            ints dots[R][P];
            add_stretch<BITS>(dots, at, *x);
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) {
                    floats whole = __builtin_convertvector(dots[r][p], floats);
                    if constexpr (GROUPED)
                        sums[r][p] = multiply_add(whole * x->scales[r], group.scales[p], sums[r][p]);
                    else
                        sums[r][p] = multiply_add(whole, all(x->scales[r]), sums[r][p]);
                }
            if (GROUPED && has_offsets)
                for (int r = 0; r < R; r++)
                    for (int p = 0; p < P; p++)
                        sums[r][p] = multiply_add(group.offsets[p], all(x->scaled_sums[r]), sums[r][p]);
        }
        if constexpr (!GROUPED)
            for (int p = 0; p < P; p++)
                for (int r = 0; r < R; r++) sums[r][p] *= group.scales[p];
        at = scales_at + P * (w.scale_bytes() + w.offset_bytes());
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) {
            int64_t column = (block * QUANTIZED_PANELS + p) * LANES, rest = w.shape.num_columns - column;
            put(y + r * y_step + column, sums[r][p], rest < LANES ? int(rest) : LANES);
        }
}

// Prefetches as in linear.h: several tiles prefetch the block that follows; a single tile, which is bound by memory,
// prefetches its own block, a fixed distance ahead.
template <int BITS, bool GROUPED, class Out, int P>
void quantized_block(const QuantizedLinear& w, const Rows& x, int64_t block, Out* y, int64_t y_step) {
    int64_t tiles = num_tiles<QUANTIZED_ROWS>(x.num_rows), tile = 0, bytes = w.group_bytes() * P / w.group_stretches();
    int64_t each = (bytes / 64 + tiles) / tiles * 64;
    const uint8_t* next = tiles > 1 ? w.block(block + 1) : w.block(block) + BYTES_AHEAD;
    for_each_tile<QUANTIZED_ROWS>(x.num_rows, [&]<int R>(int64_t row) {
        BytesAhead ahead{next + tile * each * x.num_stretches, tile * each < bytes ? each : 0};
        quantized_tile<BITS, GROUPED, Out, R, P>(w, x.tile(tile), block, y + row * y_step, y_step, ahead);
        tile++;
    });
}

template <int BITS, bool GROUPED, class Out>
void quantized_blocks(const QuantizedLinear& w, const Rows& x, int64_t first, int64_t last, Out* y, int64_t y_step) {
    for (int64_t block = first; block < last; block++)
        with_constant<QUANTIZED_PANELS>(int(w.block_panels(block)), [&]<int P>() {
            quantized_block<BITS, GROUPED, Out, P>(w, x, block, y, y_step);
        });
}

// Rows -> y [M, N]: one thread's share of the blocks, in a parallel region.
template <class Out>
void quantized_share(const Rows& rows, const QuantizedLinear& w, Out* y, int64_t y_step) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = part_start(w.num_blocks(), threads, thread);
    const int64_t last = part_start(w.num_blocks(), threads, thread + 1);
    const bool grouped = w.num_groups() > 1 || w.offset_bytes();
    if (w.shape.bits == 4 && grouped)
        quantized_blocks<4, true>(w, rows, first, last, y, y_step);
    else if (w.shape.bits == 4)
        quantized_blocks<4, false>(w, rows, first, last, y, y_step);
    else if (grouped)
        quantized_blocks<8, true>(w, rows, first, last, y, y_step);
    else
        quantized_blocks<8, false>(w, rows, first, last, y, y_step);
}

// x [M, K] bf16 with rows `x_step` numbers apart -> y [M, N].
template <class Out>
void quantized_linear(
    const bf16* x, int64_t x_step, int64_t num_rows, const QuantizedLinear& w, Out* y, int64_t y_step
) {
    if (!num_rows) return;
    std::unique_ptr<Stretch[]> memory(new Stretch[Rows::count(num_rows, w.num_stretches())]);
    Rows rows{memory.get(), num_rows, w.num_stretches()};
#pragma omp parallel
    {
        quantize_share(x, x_step, w.shape.num_inner, w.shape.middle, rows);
#pragma omp barrier
        quantized_share(rows, w, y, y_step);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
