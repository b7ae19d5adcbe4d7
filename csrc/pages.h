// The pages of one layer's keys and values, and writing the new tokens of a step into them.
//
// A page holds P positions of one kv head, P a multiple of 16:
//     keys    [P / LANES][C / 2][LANES positions][2]: panels of positions, summed over C
//     values  [P / 2][C][2]: panels of C, summed over positions
// Writing an even position zeroes the odd one after it: they are summed as a pair, and stale data could be NaN. Other
// unwritten positions are never read, or masked.
//
// In 8 bits (codes.h) a page holds quads in place of two pairs, and there are scales:
//     keys    [P / LANES][C / 4][LANES positions][4]
//     values  [P / 4][C][4]
// A block is unpacked into pairs before it is multiplied. Every byte is a finite code, so nothing has to be zeroed;
// scales of unwritten positions are masked.

#pragma once

#include "codes.h"

namespace shardwise {
namespace INSTRUCTION_SET {

constexpr int MAX_HEAD_DIM = 256;

struct Pages {
    void *keys, *values;               // [K, number of pages, P, C]
    float *key_scales, *value_scales;  // [K, number of pages, P], for codes
    int64_t num_kv_heads, num_pages, page_tokens, head_dim;
    int page_shift;  // page_tokens divides BLOCK_TOKENS, so it is a power of 2

    // The index of a page's first vector.
    int64_t at(int64_t head, int64_t page) const { return (head * num_pages + page) * page_tokens; }
};

// The tokens of one sequence in a step: `count` tokens from position `start`; the first is token `first` of the step.
struct Span {
    int64_t start, count, first;
    const int32_t* pages;
};

// The N tokens of a step: q [N, H, C], k and v [N, K, C] with strides between tokens; RoPE tables cos and sin
// [N, C / 2], or null; out [N, H, C].
struct Step {
    const bf16 *q, *k, *v;
    int64_t q_token, k_token, v_token, num_heads;
    const bf16 *cos, *sin;
    int64_t window;  // 0: none
    bf16* out;
};

// Applies RoPE to a head (kernels/reference/rope.py), or copies it without tables.
INLINE void apply_rope(const Step& step, int64_t token, const bf16* from, int64_t size, bf16* to) {
    if (!step.cos) {
        memcpy(to, from, size * 2);
        return;
    }
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        floats a = load_bf16(from + i), b = load_bf16(from + half + i);
        floats c = load_bf16(step.cos + token * half + i), s = load_bf16(step.sin + token * half + i);
        store_bf16(to + i, a * c - b * s);
        store_bf16(to + half + i, b * c + a * s);
    }
}

// Writes a key and a value into offset `at` of the page whose first vector is `first`.
static void write_numbers(const Pages& pages, int64_t first, int64_t at, const bf16* key, const bf16* value) {
    const int64_t size = pages.head_dim;
    bf16* panel = (bf16*)pages.keys + (first + at / LANES * LANES) * size + at % LANES * 2;
    for (int64_t c = 0; c < size; c += 2) memcpy(panel + c * LANES, key + c, 4);
    bf16* pairs = (bf16*)pages.values + (first + at / 2 * 2) * size;
    if (at % 2)
        for (int64_t c = 0; c < size; c++) pairs[2 * c + 1] = value[c];
    else
        for (int64_t c = 0; c < size; c++) pairs[2 * c] = value[c], pairs[2 * c + 1] = 0;
}

template <class Format>
static void write_codes(const Pages& pages, int64_t first, int64_t at, const bf16* key, const bf16* value) {
    const int64_t size = pages.head_dim;
    uint8_t codes[MAX_HEAD_DIM];
    pages.key_scales[first + at] = quantize<Format>(key, size, codes);
    uint8_t* panel = (uint8_t*)pages.keys + (first + at / LANES * LANES) * size + at % LANES * 4;
    for (int64_t c = 0; c < size; c++) panel[c / 4 * 4 * LANES + place_in_quad(c)] = codes[c];
    pages.value_scales[first + at] = quantize<Format>(value, size, codes);
    uint8_t* quads = (uint8_t*)pages.values + (first + at / 4 * 4) * size + place_in_quad(at);
    for (int64_t c = 0; c < size; c++) quads[4 * c] = codes[c];
}

template <class Format>
static void write_head(const Pages& pages, const Step& step, const Span& span, int64_t head) {
    const int64_t size = pages.head_dim;
    alignas(64) bf16 key[MAX_HEAD_DIM];
    for (int64_t i = 0; i < span.count; i++) {
        int64_t token = span.first + i, position = span.start + i, at = position % pages.page_tokens;
        int64_t first = pages.at(head, span.pages[position / pages.page_tokens]);
        apply_rope(step, token, step.k + token * step.k_token + head * size, size, key);
        const bf16* value = step.v + token * step.v_token + head * size;
        if constexpr (Format::HAS_CODES)
            write_codes<Format>(pages, first, at, key, value);
        else
            write_numbers(pages, first, at, key, value);
    }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
