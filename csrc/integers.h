// Vectors of small integers and fp16 numbers, for quantized products; an addition to vectors.h.

#pragma once

#include "vectors.h"

namespace shardwise {
namespace INSTRUCTION_SET {

typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));

// Adds to each sum the dot product of four unsigned codes, a lane of `codes`, and the four signed codes of `four`.
INLINE ints dot_fours(ints sums, words codes, uint32_t four) {
#if SHARDWISE_VNNI
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(int(four)));
#elif SHARDWISE_AVX512 || SHARDWISE_AVX2
    // Pairs of 16-bit products: a sum of two 8-bit products, up to 2 * 255 * 127, overflows 16 bits.
    const uint32_t even = (uint32_t(int16_t(int8_t(four))) & 0xffff) | uint32_t(int16_t(int8_t(four >> 16))) << 16;
    const uint32_t odd = (uint32_t(int16_t(int8_t(four >> 8))) & 0xffff) | uint32_t(int16_t(int8_t(four >> 24))) << 16;
    const words low = codes & 0x00ff00ffu, high = (codes >> 8) & 0x00ff00ffu;
#if SHARDWISE_AVX512
    sums += (ints)_mm512_madd_epi16((__m512i)low, _mm512_set1_epi32(int(even)));
    return sums + (ints)_mm512_madd_epi16((__m512i)high, _mm512_set1_epi32(int(odd)));
#else
    sums += (ints)_mm256_madd_epi16((__m256i)low, _mm256_set1_epi32(int(even)));
    return sums + (ints)_mm256_madd_epi16((__m256i)high, _mm256_set1_epi32(int(odd)));
#endif
#else
    for (int i = 0; i < 4; i++) sums += (ints)((codes >> (8 * i)) & 255u) * int32_t(int8_t(four >> (8 * i)));
    return sums;
#endif
}

// Rounds numbers far below 2^22 to the nearest integer, ties to even.
INLINE ints round_to_int(floats v) {
    const float to_nearest = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return (ints)(v + to_nearest) - (ints)all(to_nearest);
}

INLINE int32_t sum_ints(ints v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// fp16 -> fp32, exact.
INLINE floats widen_half(shorts v) {
#if SHARDWISE_AVX512
    return (floats)_mm512_cvtph_ps((__m256i)v);
#elif SHARDWISE_F16C
    return (floats)_mm256_cvtph_ps((__m128i)v);
#else
    // The shifted bits are a float that is off by a power of two; that also holds for subnormal numbers.
    words bits = __builtin_convertvector(v, words);
    floats sized = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    ints special = (ints)((bits & 0x7c00) == 0x7c00);
    words found = (words)sized | ((words)special & 0x7f800000u);
    return (floats)(found | (bits & 0x8000) << 16);
#endif
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
