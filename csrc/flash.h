// Causal attention for training, forward and backward (FlashAttention, Dao et al. 2022): scores, softmax and weighted
// values of some tokens are computed while they are in the cache, and recomputed in the backward instead of saved.
//
// A block of scores has whole rows, so its softmax needs no online correction and no statistics are saved. A row of
// fp32 scores is as long as the sequence, so memory is linear in its length. Threads share sequences and kv heads, and
// in the forward blocks; every sum is in the order of tokens, so results do not depend on the threads.
//
// The tokens of a kv head are packed in two orders, for the two directions of products:
//     token panels    [T / LANES][C / 2][LANES][2]: panels of tokens, summed over C
//     channel panels  [T / 2][C][2]: panels of C, summed over tokens

#pragma once

#include <omp.h>

#include <cmath>
#include <cstdlib>

#include "kernels.h"
#include "tile.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int64_t BLOCK_ROWS = 96, MAX_BLOCK_TOKENS = 32;

INLINE int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <class T>
struct Buffer {
    T* at;

    explicit Buffer(int64_t count) : at((T*)std::aligned_alloc(64, rounded_up(count * sizeof(T) + 1, 64))) {}
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(at); }
};

// -- packing -------------------------------------------------------------------------------------------------

// Packs `count` rows [C], `step` numbers apart, into token panels. Missing rows of the last panel are zeros.
static void pack_tokens(const bf16* from, int64_t step, int64_t count, int64_t size, uint32_t* to) {
    const int64_t pairs = size / 2;
    for (int64_t row = 0; row < rounded_up(count, LANES); row++) {
        uint32_t* lane = to + row / LANES * LANES * pairs + row % LANES;
        for (int64_t c = 0; c < pairs; c++) {
            uint32_t pair = 0;
            if (row < count) memcpy(&pair, from + row * step + 2 * c, 4);
            lane[c * LANES] = pair;
        }
    }
}

INLINE words pairs_of(shorts first, shorts second) {
    return __builtin_convertvector(first, words) | __builtin_convertvector(second, words) << 16;
}

// Packs the same rows into channel panels of `num_rows`.
static void pack_channels(
    const bf16* from, int64_t step, int64_t count, int64_t num_rows, int64_t size, uint32_t* to
) {
    for (int64_t row = 0; row < num_rows; row += 2)
        for (int64_t c = 0; c < size; c += LANES) {
            shorts first = {}, second = {};
            if (row < count) first = load<bf16, shorts>(from + row * step + c);
            if (row + 1 < count) second = load<bf16, shorts>(from + (row + 1) * step + c);
            store(to + row / 2 * size + c, pairs_of(first, second));
        }
}

// -- products ------------------------------------------------------------------------------------------------

// Pair k of row r is at pairs[r * row_step + k * pair_step]; that of panel p at panels[p * panel_step + k * pair_step].
struct Left {
    const uint32_t* pairs;
    int64_t row_step, pair_step;
};

struct Right {
    const uint32_t* panels;
    int64_t panel_step, pair_step;
};

// Multiplies an even number of rows by panels [first, last), a tile of an even number of rows at a time. Calls
// load_sums(row, panel, sums) to initialize a tile and store_sums(row, panel, sums) when it is done.
template <class Load, class Store>
INLINE void products(
    const Left& left, int64_t num_rows, const Right& right, int64_t first, int64_t last, int64_t num_pairs,
    Load&& load_sums, Store&& store_sums
) {
    for (int64_t panel = first; panel < last; panel += TILE_PANELS)
        for (int64_t row = 0; row < num_rows; row += TILE_ROWS)
            with_constant<TILE_PANELS>(int(last - panel), [&]<int P>() {
                with_constant<TILE_ROWS / 2>(int((num_rows - row) / 2), [&]<int HALF>() {
                    floats sums[2 * HALF][P] = {};
                    Panels<P> panels{{}, right.pair_step};
                    for (int p = 0; p < P; p++) panels.panel[p] = right.panels + (panel + p) * right.panel_step;
                    load_sums(row, panel, sums);
                    const uint32_t* rows = left.pairs + row * left.row_step;
                    add_products(sums, rows, left.row_step, panels, num_pairs, NoPrefetch(), left.pair_step);
                    store_sums(row, panel, sums);
                });
            });
}

struct FromZero {
    template <int R, int P>
    INLINE void operator()(int64_t, int64_t, floats (&)[R][P]) const {}
};

// -- a block -------------------------------------------------------------------------------------------------

// `num_tokens` tokens from `start`, of G rows each, and the panels [first, last) of tokens that they attend to.
struct RowBlock {
    int64_t start, num_tokens, num_rows, first, last;

    int64_t even_rows() const { return rounded_up(num_rows, 2); }
    int64_t num_pairs() const { return (last - first) * LANES / 2; }
    int64_t first_pair() const { return first * LANES / 2; }
};

// One kv head of one sequence, and the query heads that share it.
struct Head {
    const Causal& a;
    const int32_t* documents;
    int64_t sequence, kv_head, group, size;

    Head(const Causal& a, int64_t number)
        : a(a), documents(nullptr), sequence(number / a.num_kv_heads), kv_head(number % a.num_kv_heads),
          group(a.num_heads / a.num_kv_heads), size(a.head_dim) {
        if (a.documents) documents = a.documents + sequence * rounded_up(a.num_tokens, 16);
    }
    int64_t q_at(int64_t token) const {
        return ((sequence * a.num_tokens + token) * a.num_heads + kv_head * group) * size;
    }
    int64_t kv_at(int64_t token) const { return ((sequence * a.num_tokens + token) * a.num_kv_heads + kv_head) * size; }
    int64_t kv_step() const { return a.num_kv_heads * size; }
    float scale() const { return 1 / std::sqrt(float(size)); }
    int64_t first_visible(int64_t token) const { return a.window && token >= a.window ? token - a.window + 1 : 0; }
};

INLINE int64_t block_tokens(const Causal& a) {
    int64_t tokens = BLOCK_ROWS / (a.num_heads / a.num_kv_heads);
    if (tokens > MAX_BLOCK_TOKENS) tokens = MAX_BLOCK_TOKENS;
    return tokens ? tokens : 1;
}

INLINE int64_t num_blocks(const Causal& a) { return (a.num_tokens + block_tokens(a) - 1) / block_tokens(a); }

static RowBlock row_block(const Head& head, int64_t number) {
    int64_t size = block_tokens(head.a), start = number * size, rest = head.a.num_tokens - start;
    int64_t count = rest < size ? rest : size, lowest = head.first_visible(start);
    if (const int32_t* documents = head.documents) {
        int32_t least = documents[start], most = least;
        for (int64_t token = start; token < start + count; token++) {
            if (documents[token] < least) least = documents[token];
            if (documents[token] > most) most = documents[token];
        }
        while (lowest < start && (documents[lowest] < least || documents[lowest] > most)) lowest++;
    }
    return {start, count, count * head.group, lowest / LANES, (start + count - 1) / LANES + 1};
}

INLINE int64_t max_rows(const Causal& a) { return rounded_up(block_tokens(a) * (a.num_heads / a.num_kv_heads), 2); }

// Stride between rows of scores: not a power of two, which would map them to the same cache sets.
INLINE int64_t row_stride(const Causal& a) { return rounded_up(a.num_tokens, 16) + 16; }

struct ForwardScratch {
    int64_t stride;
    Buffer<bf16> q, weights;
    Buffer<float> scores, row_sum;

    explicit ForwardScratch(const Causal& a)
        : stride(row_stride(a)), q(max_rows(a) * a.head_dim), weights(max_rows(a) * stride),
          scores(max_rows(a) * stride), row_sum(max_rows(a)) {}
};

// Copies the rows of a block out of [B, T, H, C], and adds a row of zeros to an odd number.
static void copy_rows(const Head& head, const RowBlock& block, const bf16* from, bf16* to) {
    const int64_t width = head.group * head.size;
    for (int64_t i = 0; i < block.num_tokens; i++)
        memcpy(to + i * width, from + head.q_at(block.start + i), width * sizeof(bf16));
    if (block.num_rows % 2) memset(to + block.num_rows * head.size, 0, head.size * sizeof(bf16));
}

// The address of row `row` of a block in [B, T, H, C].
INLINE bf16* row_address(const Head& head, const RowBlock& block, bf16* whole, int64_t row) {
    return whole + head.q_at(block.start + row / head.group) + row % head.group * head.size;
}

static void compute_scores(
    const Head& head, const RowBlock& block, const bf16* q, const uint32_t* keys, float* scores, int64_t stride
) {
    const int64_t pairs = head.size / 2;
    const float scale = head.scale();
    Left left{(const uint32_t*)q, pairs, 1};
    Right right{keys, pairs * LANES, LANES};
    products(left, block.even_rows(), right, block.first, block.last, pairs, FromZero(),
             [&]<int R, int P>(int64_t row, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R; r++)
                     for (int p = 0; p < P; p++)
                         store(scores + (row + r) * stride + (panel + p) * LANES, sums[r][p] * scale);
             });
}

// Masks a row of scores, and returns the largest of the others.
INLINE float mask_row(const Head& head, const RowBlock& block, int64_t token, float* scores) {
    const int64_t lowest_token = head.first_visible(token);
    const int32_t* documents = head.documents;
    floats most = all(minus_infinity());
    for (int64_t start = block.first * LANES; start < block.last * LANES; start += LANES) {
        floats v = load(scores + start);
        if (documents || start < lowest_token || start + LANES - 1 > token) {
            ints at = lane_numbers() + int(start);
            ints visible = (at <= int(token)) & (at >= int(lowest_token));
            if (documents) visible &= load<int32_t, ints>(documents + start) == documents[token];
            v = select(visible, v, all(minus_infinity()));
            store(scores + start, v);
        }
        most = maximum(v, most);
    }
    return max_lane(most);
}

INLINE int64_t token_of(const Head& head, const RowBlock& block, int64_t row) {
    return block.start + (row < block.num_rows ? row : block.num_rows - 1) / head.group;
}

// -- forward -------------------------------------------------------------------------------------------------

static void softmax_block(const Head& head, const RowBlock& block, ForwardScratch& s) {
    for (int64_t row = 0; row < block.even_rows(); row++) {
        float* scores = s.scores.at + row * s.stride;
        float top = mask_row(head, block, token_of(head, block, row), scores);
        floats total = {};
        for (int64_t at = block.first * LANES; at < block.last * LANES; at += LANES) {
            floats weight = exponential(load(scores + at) - top);
            total += weight;
            store_bf16(s.weights.at + row * s.stride + at, weight);
        }
        s.row_sum.at[row] = sum(total);
    }
}

static void forward_block(
    const Head& head, const RowBlock& block, const uint32_t* keys, const uint32_t* values, ForwardScratch& s, bf16* out
) {
    const int64_t size = head.size;
    copy_rows(head, block, head.a.q, s.q.at);
    compute_scores(head, block, s.q.at, keys, s.scores.at, s.stride);
    softmax_block(head, block, s);
    Left left{(const uint32_t*)s.weights.at + block.first_pair(), s.stride / 2, 1};
    Right right{values + block.first_pair() * size, LANES, size};
    products(left, block.even_rows(), right, 0, size / LANES, block.num_pairs(), FromZero(),
             [&]<int R, int P>(int64_t row, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R && row + r < block.num_rows; r++) {
                     bf16* at = row_address(head, block, out, row + r) + panel * LANES;
                     float share = 1 / s.row_sum.at[row + r];
                     for (int p = 0; p < P; p++) store_bf16(at + p * LANES, sums[r][p] * share);
                 }
             });
}

// Computes the attention output [B, T, H, C].
void causal_forward(const Causal& a, bf16* out) {
    const int64_t padded = rounded_up(a.num_tokens, LANES), each = padded * a.head_dim / 2;
    const int64_t heads = a.num_sequences * a.num_kv_heads, blocks = num_blocks(a);
    Buffer<uint32_t> keys(heads * each), values(heads * each);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads; i++) {
            Head head(a, i);
            const int64_t at = head.kv_at(0), step = head.kv_step();
            pack_tokens(a.k + at, step, a.num_tokens, a.head_dim, keys.at + i * each);
            pack_channels(a.v + at, step, a.num_tokens, padded, a.head_dim, values.at + i * each);
        }
        ForwardScratch scratch(a);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads * blocks; task++) {
            Head head(a, task / blocks);
            RowBlock block = row_block(head, task % blocks);
            const int64_t at = task / blocks * each;
            forward_block(head, block, keys.at + at, values.at + at, scratch, out);
        }
    }
}

// -- backward ------------------------------------------------------------------------------------------------

// Buffers of one kv head's backward: packed keys and values, sums of their gradients, and a block of rows.
struct BackwardScratch {
    int64_t padded, size, rows, stride;
    Buffer<uint32_t> key_tokens, key_channels, value_tokens;
    Buffer<float> dk, dv;                      // [T, C]
    Buffer<bf16> q, dy;                        // [rows, C]
    Buffer<uint32_t> q_channels, dy_channels;  // of rows
    Buffer<float> p, delta;
    Buffer<bf16> d_scores;
    Buffer<uint32_t> p_pairs, d_pairs;  // [rows / 2, tokens], pairs of rows

    explicit BackwardScratch(const Causal& a)
        : padded(rounded_up(a.num_tokens, LANES)), size(a.head_dim), rows(max_rows(a)), stride(row_stride(a)),
          key_tokens(padded * size / 2),
          key_channels(padded * size / 2), value_tokens(padded * size / 2), dk(padded * size), dv(padded * size),
          q(rows * size), dy(rows * size), q_channels(rows * size / 2), dy_channels(rows * size / 2),
          p(rows * stride), delta(rows), d_scores(rows * stride), p_pairs(rows * stride / 2),
          d_pairs(rows * stride / 2) {}
};

// Computes delta, the sum of dy y of every row; y is in the buffer of q.
static void compute_delta(const RowBlock& block, BackwardScratch& s) {
    for (int64_t row = 0; row < block.even_rows(); row++) {
        floats total = {};
        for (int64_t c = row * s.size; c < (row + 1) * s.size; c += LANES)
            total = multiply_add(load_bf16(s.q.at + c), load_bf16(s.dy.at + c), total);
        s.delta.at[row] = sum(total);
    }
}

// Turns scores into probabilities, two rows at a time.
static void compute_probabilities(const Head& head, const RowBlock& block, BackwardScratch& s) {
    const int64_t start = block.first * LANES, stop = block.last * LANES;
    for (int64_t row = 0; row < block.even_rows(); row += 2) {
        float* p[2] = {s.p.at + row * s.stride, s.p.at + (row + 1) * s.stride};
        float top[2], share[2];
        for (int i = 0; i < 2; i++) {
            top[i] = mask_row(head, block, token_of(head, block, row + i), p[i]);
            floats total = {};
            for (int64_t at = start; at < stop; at += LANES) {
                floats weight = exponential(load(p[i] + at) - top[i]);
                total += weight;
                store(p[i] + at, weight);
            }
            share[i] = 1 / sum(total);
        }
        for (int64_t at = start; at < stop; at += LANES) {
            floats first = load(p[0] + at) * share[0], second = load(p[1] + at) * share[1];
            store(p[0] + at, first);
            store(p[1] + at, second);
            store(s.p_pairs.at + row / 2 * s.stride + at, pairs_of(narrow(first), narrow(second)));
        }
    }
}

// d_scores = p (dy v^T - delta), times the scale of scores, in both orders.
static void compute_score_gradients(const Head& head, const RowBlock& block, BackwardScratch& s) {
    const float scale = head.scale();
    const int64_t stride = s.stride;
    Left left{(const uint32_t*)s.dy.at, s.size / 2, 1};
    Right right{s.value_tokens.at, s.size / 2 * LANES, LANES};
    products(left, block.even_rows(), right, block.first, block.last, s.size / 2, FromZero(),
             [&]<int R, int P>(int64_t row, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R; r += 2)
                     for (int p = 0; p < P; p++) {
                         const int64_t at = (panel + p) * LANES, here = (row + r) * stride + at;
                         const float* delta = s.delta.at + row + r;
                         shorts first = narrow(load(s.p.at + here) * ((sums[r][p] - delta[0]) * scale));
                         shorts second =
                             narrow(load(s.p.at + here + stride) * ((sums[r + 1][p] - delta[1]) * scale));
                         store(s.d_scores.at + here, first);
                         store(s.d_scores.at + here + stride, second);
                         store(s.d_pairs.at + (row + r) / 2 * stride + at, pairs_of(first, second));
                     }
             });
}

// sums [tokens, C] += weights^T [tokens, rows] by rows [rows, C].
static void add_rows(
    const RowBlock& block, const BackwardScratch& s, const uint32_t* weights, const uint32_t* rows, float* sums_of
) {
    const int64_t start = block.first * LANES, size = s.size;
    Left left{weights + start, 1, s.stride};
    Right right{rows, LANES, size};
    auto place = [&](int64_t token, int64_t panel) { return sums_of + (start + token) * size + panel * LANES; };
    products(left, (block.last - block.first) * LANES, right, 0, size / LANES, block.even_rows() / 2,
             [&]<int R, int P>(int64_t token, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R; r++)
                     for (int p = 0; p < P; p++) sums[r][p] = load(place(token + r, panel + p));
             },
             [&]<int R, int P>(int64_t token, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R; r++)
                     for (int p = 0; p < P; p++) store(place(token + r, panel + p), sums[r][p]);
             });
}

static void backward_block(
    const Head& head, const RowBlock& block, BackwardScratch& s, const bf16* out, const bf16* d_out, bf16* dq
) {
    const int64_t size = s.size;
    copy_rows(head, block, d_out, s.dy.at);
    copy_rows(head, block, out, s.q.at);
    compute_delta(block, s);
    copy_rows(head, block, head.a.q, s.q.at);
    pack_channels(s.q.at, size, block.even_rows(), block.even_rows(), size, s.q_channels.at);
    pack_channels(s.dy.at, size, block.even_rows(), block.even_rows(), size, s.dy_channels.at);
    compute_scores(head, block, s.q.at, s.key_tokens.at, s.p.at, s.stride);
    compute_probabilities(head, block, s);
    compute_score_gradients(head, block, s);
    add_rows(block, s, s.p_pairs.at, s.dy_channels.at, s.dv.at);
    add_rows(block, s, s.d_pairs.at, s.q_channels.at, s.dk.at);
    Left left{(const uint32_t*)s.d_scores.at + block.first_pair(), s.stride / 2, 1};
    Right right{s.key_channels.at + block.first_pair() * size, LANES, size};
    products(left, block.even_rows(), right, 0, size / LANES, block.num_pairs(), FromZero(),
             [&]<int R, int P>(int64_t row, int64_t panel, floats (&sums)[R][P]) {
                 for (int r = 0; r < R && row + r < block.num_rows; r++) {
                     bf16* at = row_address(head, block, dq, row + r) + panel * LANES;
                     for (int p = 0; p < P; p++) store_bf16(at + p * LANES, sums[r][p]);
                 }
             });
}

static void backward_head(
    const Head& head, BackwardScratch& s, const bf16* out, const bf16* d_out, bf16* dq, bf16* dk, bf16* dv
) {
    const Causal& a = head.a;
    const int64_t at = head.kv_at(0), step = head.kv_step(), size = s.size;
    pack_tokens(a.k + at, step, a.num_tokens, size, s.key_tokens.at);
    pack_channels(a.k + at, step, a.num_tokens, s.padded, size, s.key_channels.at);
    pack_tokens(a.v + at, step, a.num_tokens, size, s.value_tokens.at);
    memset(s.dk.at, 0, s.padded * size * sizeof(float));
    memset(s.dv.at, 0, s.padded * size * sizeof(float));
    for (int64_t i = 0; i < num_blocks(a); i++) backward_block(head, row_block(head, i), s, out, d_out, dq);
    for (int64_t token = 0; token < a.num_tokens; token++)
        for (int64_t c = 0; c < size; c += LANES) {
            store_bf16(dk + head.kv_at(token) + c, load(s.dk.at + token * size + c));
            store_bf16(dv + head.kv_at(token) + c, load(s.dv.at + token * size + c));
        }
}

// Computes the gradients of q, k and v from the output [B, T, H, C] and its gradient.
void causal_backward(const Causal& a, const bf16* out, const bf16* d_out, bf16* dq, bf16* dk, bf16* dv) {
#pragma omp parallel
    {
        BackwardScratch scratch(a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.num_sequences * a.num_kv_heads; i++)
            backward_head(Head(a, i), scratch, out, d_out, dq, dk, dv);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
