// Keys and values in 8 bits: a code for each number, and a scale for each vector (kernels/kv.py).
//
// Products are made of pairs of bf16, which has every code exactly. So codes lie in quads, where pairs would lie in
// pairs: a quad is two pairs that follow each other, x0 x2 x1 x3, each of whose halves becomes a half of a pair where
// it lies.

#pragma once

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

typedef uint8_t bytes __attribute__((vector_size(LANES)));

INLINE int64_t place_in_quad(int64_t i) { return i % 2 * 2 + i / 2 % 2; }

// Numbers as they are, in bf16.
struct Plain {
    static constexpr bool HAS_CODES = false;
    static constexpr int NUMBER_BYTES = 2;
    static constexpr float UNIT = 1;
};

// Codes that are whole numbers. A byte in the place of the last digits of 2^23 + n, or of 2^15 + n, is made a float by
// taking off what is too much; floats of so few digits end in 16 zeros.
struct Int8 {
    static constexpr bool HAS_CODES = true;
    static constexpr int NUMBER_BYTES = 1;
    static constexpr float LARGEST = 127, UNIT = 1;

    static INLINE words encode(floats x) { return (words)(x + 12582912.0f) & 0xff; }  // 1.5 * 2^23: no fractions

    static INLINE words first_pair(words quads) { return pair(low(quads), low(quads >> 16)); }
    static INLINE words second_pair(words quads) { return pair(high(quads), high(quads >> 16)); }

   private:
    static INLINE floats low(words w) { return (floats)((w & 0xff) ^ 0x4b000080u) - (8388608.0f + 128.0f); }
    static INLINE floats high(words w) { return (floats)((w & 0xff00) ^ 0x47008000u) - (32768.0f + 128.0f); }
    static INLINE words pair(floats first, floats second) { return (words)first >> 16 | (words)second; }
};

// Codes that are floats of 4 bits of exponent and 3 of fraction. Shifted into a bf16, whose exponents begin lower, a
// code is 2^-120 of what it means: what it is multiplied with is in units of 2^-60, and so is what is made of the two.
// Where bf16 takes small numbers as zero those would be codes below 2^-6, so there are none.
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

// The codes of a vector, in order; returns their scale.
template <class Kind>
INLINE float quantize(const bf16* x, int64_t size, uint8_t* codes) {
    ints most = {};
    for (int64_t i = 0; i < size; i += LANES) {
        ints magnitude = (ints)load_bf16(x + i) & 0x7fffffff;  // in order as integers too, and NaN the largest
        most = magnitude > most ? magnitude : most;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > largest) largest = most[lane];
    float scale;
    memcpy(&scale, &largest, 4);
    scale /= Kind::LARGEST;
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = load_bf16(x + i) / scale;
        y = choose(y == y, y, floats{});  // zeros have a scale of 0
        y = larger(all(-Kind::LARGEST), y < Kind::LARGEST ? y : all(Kind::LARGEST));
        store(codes + i, __builtin_convertvector(Kind::encode(y), bytes));
    }
    return scale;
}

// Rows of quads as twice as many rows of pairs, each `width` wide.
template <class Kind>
INLINE void unpack(const uint32_t* quads, int64_t num_rows, int64_t width, uint32_t* pairs) {
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            words w = load<uint32_t, words>(quads + row * width + i);
            store(pairs + 2 * row * width + i, Kind::first_pair(w));
            store(pairs + (2 * row + 1) * width + i, Kind::second_pair(w));
        }
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
