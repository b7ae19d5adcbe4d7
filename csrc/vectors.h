// Vectors as wide as a register, on any processor: GCC and Clang lower these vector types to what it has.
//
// Included by kernels.cpp, which is compiled once per instruction set, each time in another namespace.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#define SHARDWISE_AVX2 1
#endif
#if defined(__AVX512F__)
#define SHARDWISE_AVX512 1
#endif
#if defined(__AVX512BF16__)
#define SHARDWISE_AVX512_BF16 1
#endif
#if defined(__AVX512VNNI__)
#define SHARDWISE_VNNI 1
#endif
#if defined(__F16C__)
#define SHARDWISE_F16C 1
#endif

#define INLINE inline __attribute__((always_inline))

namespace shardwise {
namespace INSTRUCTION_SET {

#if SHARDWISE_AVX512
constexpr int LANES = 16;
#elif SHARDWISE_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

typedef uint16_t bf16;

template <class T, class V = floats>
INLINE V load(const T* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class T, class V>
INLINE void store(T* to, V v) {
    memcpy(to, &v, sizeof v);
}

INLINE floats all(float x) { return floats{} + x; }

INLINE ints lane_numbers() {
    ints v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

INLINE float minus_infinity() { return -__builtin_inff(); }

// One bit per lane, set where the lane is true.
INLINE uint32_t lane_mask(ints where) {
#if SHARDWISE_AVX512
    return _mm512_movepi32_mask((__m512i)where);
#elif SHARDWISE_AVX2
    return uint32_t(_mm256_movemask_ps((__m256)where));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < LANES; i++) lanes |= uint32_t(where[i] < 0) << i;
    return lanes;
#endif
}

INLINE floats select(ints where, floats yes, floats no) { return where ? yes : no; }

INLINE floats maximum(floats a, floats b) { return a > b ? a : b; }

// Reduces all lanes to one number, always in the same tree.
template <class Combine>
INLINE float reduce_lanes(floats v, Combine&& combine) {
    float x[LANES];
    store(x, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = combine(x[i], x[i + half]);
    return x[0];
}

INLINE float sum(floats v) {
#if SHARDWISE_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    return reduce_lanes(v, [](float a, float b) { return a + b; });
#endif
}

INLINE float max_lane(floats v) {
#if SHARDWISE_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    return reduce_lanes(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

// a b + c, rounded once where the instruction set has a fused instruction.
INLINE floats multiply_add(floats a, floats b, floats c) {
#if SHARDWISE_AVX512
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif SHARDWISE_AVX2
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// -- bf16 --------------------------------------------------------------------------------------------------

INLINE floats widen(shorts v) { return (floats)(__builtin_convertvector(v, words) << 16); }

INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE floats load_bf16(const bf16* from) { return widen(load<bf16, shorts>(from)); }

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE shorts narrow(floats v) {
#if SHARDWISE_AVX512_BF16
    return (shorts)_mm512_cvtneps_pbh((__m512)v);  // flushes subnormal numbers to zero, as products do
#endif
    words bits = (words)v;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), shorts);
}

INLINE bf16 narrow(float x) { return narrow(all(x))[0]; }

INLINE void store_bf16(bf16* to, floats v) { store(to, narrow(v)); }

// Adds to each sum the two products of `pair`, two bf16 numbers, with the pair in its lane of `pairs`.
INLINE floats add_pairs(floats sums, uint32_t pair, words pairs) {
#if SHARDWISE_AVX512_BF16
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)pairs);
#else
    floats first = (floats)(words{} + (pair << 16)), second = (floats)(words{} + (pair & 0xffff0000u));
    sums = multiply_add(first, (floats)(pairs << 16), sums);
    return multiply_add(second, (floats)(pairs & 0xffff0000u), sums);
#endif
}

// -- exp ---------------------------------------------------------------------------------------------------

// exp(x) for x <= 88, within 2 ulp; exactly 0 below -87, near the subnormal numbers.
INLINE floats exponential(floats x) {
    const float to_nearest = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    floats power = multiply_add(x, all(1.44269504f), all(to_nearest));
    floats n = power - to_nearest;
    floats r = multiply_add(n, all(-0.693359375f), x);
    r = multiply_add(n, all(2.12194440e-4f), r);
    floats p = all(1.9875691500e-4f);
    p = multiply_add(p, r, all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    floats scaled = (floats)((ints)p + ((ints)power << 23));
    floats kept = x < -87.0f ? floats{} : scaled;
    return x != x ? x : kept;
}

}  // namespace INSTRUCTION_SET
}  // namespace shardwise
