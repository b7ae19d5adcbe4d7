// Keys and values in 8 bits: one code per number and one scale per vector (kernels/kv_cache.py).
//
// Products use pairs of bf16, which represents every code exactly. Codes are stored in quads, in place of two pairs: a
// quad is two consecutive pairs in the order x0 x2 x1 x3, so that each pair is unpacked without moving its halves.

#pragma once

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

typedef uint8_t bytes __attribute__((vector_size(LANES)));

INLINE int64_t place_in_quad(int64_t i) { return i % 2 * 2 + i / 2 % 2; }

// Unquantized numbers, in bf16.
struct Plain {
    static constexpr bool HAS_CODES = false;
    static constexpr int NUMBER_BYTES = 2;
    static constexpr float UNIT = 1;
};

// Integer codes. A byte in the low bits of 2^23 + n, or of 2^15 + n, becomes the float n by subtraction. Floats of so
// few bits end in 16 zeros, so they are bf16.
struct Int8 {
    static constexpr bool HAS_CODES = true;
    static constexpr int NUMBER_BYTES = 1;
    static constexpr float LARGEST = 127, UNIT = 1;

    // Adding 1.5 * 2^23 rounds to an integer.
    static INLINE words encode(floats x) { return (words)(x + 12582912.0f) & 0xff; }

    static INLINE words first_pair(words quads) { return pair(low(quads), low(quads >> 16)); }
    static INLINE words second_pair(words quads) { return pair(high(quads), high(quads >> 16)); }

   private:
    static INLINE floats low(words w) { return (floats)((w & 0xff) ^ 0x4b000080u) - (8388608.0f + 128.0f); }
    static INLINE floats high(words w) { return (floats)((w & 0xff00) ^ 0x47008000u) - (32768.0f + 128.0f); }
    static INLINE words pair(floats first, floats second) { return (words)first >> 16 | (words)second; }
};

// e4m3 codes: 4 bits of exponent, 3 of fraction. Shifted into a bf16, whose exponent bias is larger, a code has 2^-120
// of its value. So the other factor is scaled to units of 2^-60, and so is the product. Where bf16 flushes subnormal
// numbers to zero, those would be the codes below 2^-6, so there are none.
struct Fp8 {
    static constexpr bool HAS_CODES = true;
    static constexpr int NUMBER_BYTES = 1;
    static constexpr float LARGEST = 448, UNIT = 0x1p-60f;

    static INLINE words encode(floats x) {
        words magnitude = (words)x & 0x7fffffff, sign = (words)x >> 24 & 0x80;
        words rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;  // to the nearest, ties to even
        words is_normal = (words)((ints)magnitude >= 0x3c800000);             // 2^-6
        return ((rounded - 120 * 8) | sign) & is_normal;
    }

    static INLINE words first_pair(words quads) { return (quads << 4 & 0x07f007f0) | (quads << 8 & 0x80008000); }
    static INLINE words second_pair(words quads) { return (quads >> 4 & 0x07f007f0) | (quads & 0x80008000); }
};

// Writes the codes of a vector, in order, and returns their scale.
template <class Format>
INLINE float quantize(const bf16* x, int64_t size, uint8_t* codes) {
    ints most = {};
    for (int64_t i = 0; i < size; i += LANES) {
        ints magnitude = (ints)load_bf16(x + i) & 0x7fffffff;  // ordered like the floats, with NaN the largest
        most = magnitude > most ? magnitude : most;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > largest) largest = most[lane];
    float scale;
    memcpy(&scale, &largest, 4);
    scale /= Format::LARGEST;
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = load_bf16(x + i) / scale;
        y = select(y == y, y, floats{});  // 0 / 0 where the scale is 0
        y = maximum(all(-Format::LARGEST), y < Format::LARGEST ? y : all(Format::LARGEST));
        store(codes + i, __builtin_convertvector(Format::encode(y), bytes));
    }
    return scale;
}

// Unpacks rows of quads into twice as many rows of pairs, each `width` wide.
template <class Format>
INLINE void unpack(const uint32_t* quads, int64_t num_rows, int64_t width, uint32_t* pairs) {
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            words w = load<uint32_t, words>(quads + row * width + i);
            store(pairs + 2 * row * width + i, Format::first_pair(w));
            store(pairs + (2 * row + 1) * width + i, Format::second_pair(w));
        }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
