// Vectors of as many floats as a register holds, in the extension that GCC and Clang share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;  // floats in a register; rows of a product that are held at a time
#else
constexpr int LANES = 8, ROWS = 6;
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec all(float x) { return x - vec{}; }  // compilers make one broadcast of this, of a loop they do not
INLINE vec larger(vec a, vec b) { return b > a ? b : a; }  // a NaN in a stays

// Asks for floats that are soon read or written; they need not be there.
INLINE void fetch(const float *from, long count) {
    for (long i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

INLINE float sum(vec x) {
    float total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// e^x within 2e-7 of its value, for x up to 88; 0 below -87. A polynomial for the fraction, exponent bits for the rest.
INLINE vec exp(vec x) {
    vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest whole number is in the low bits
    vec whole = shifted - 12582912.0f, r = x - whole * 0.693359375f + whole * 2.12194440e-4f, r2 = r * r;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // pairs of terms, to wait less for each other
    p = p * r2 + (r * 8.3334519073e-3f + 4.1665795894e-2f);
    p = p * r2 + (r * 1.6666665459e-1f + 5.0000001201e-1f);
    p = p * r2 + (r + 1.0f);
    vec power = (vec)(((ivec)shifted << 23) + (ivec)all(1.0f));
    return x < -87.0f ? vec{} : p * power;
}
