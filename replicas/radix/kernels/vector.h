/* Vectors of floats as wide as the machine has them, and the operations on them that C lacks. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef __AVX512DQ__
#define LANES 16
#define TILE 12 /* rows of x that share one pass over a panel: with two vectors, all registers */
#else
#define LANES 8
#define TILE 6
#endif
#define PANEL (2 * LANES) /* columns of a weight panel */
#define LARGEST_BLOCK 64  /* tokens */
#define CAT(a, b) a##_##b
#define JOINED(a, b) CAT(a, b)
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
enum mode { SET, ADD, GATED };
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef bf16 halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec load(const float *p) { return *(const unaligned *)p; }
INLINE void store(float *p, vec v) { *(unaligned *)p = v; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec widen(const bf16 *p) {
    return (vec)(__builtin_convertvector(*(const halves *)p, words) << 16);
}

/* What a kernel writes for the next one to read, in the type that one reads. */
INLINE void put_float32(float *p, vec v) { store(p, v); }
INLINE void put_bfloat16(bf16 *p, vec v) {
#ifdef __AVX512BF16__
    *(__m256i_u *)p = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    words bits = (words)v; /* to nearest even; what is not a number is nobody's */
    *(halves *)p = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
#endif
}

#if defined(__AVX512DQ__)
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float sum(vec v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float largest(vec v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE vec larger(vec a, vec b) {
    ints more = a > b;
    return (vec)((more & (ints)a) | (~more & (ints)b));
}
INLINE float sum(vec v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}
INLINE float largest(vec v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++)
        best = v[i] > best ? v[i] : best;
    return best;
}
#endif

/* Bring so many bytes near. */
INLINE void fetch(const void *p, long bytes) {
    for (long i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}

/* 2^x, to 2 ulp: 2^floor(x) times a polynomial on [0, 1], of least relative error. Zero, or
 * next to nothing, where x is below -126; very much, or infinity, where it is above 127. */
INLINE vec power(vec x) {
#ifdef __AVX512DQ__
    vec f = (vec)_mm512_reduce_ps((__m512)x, 1); /* less its floor; 0 of an infinity */
#else
    x = -larger(-larger(x, splat(-126.5f)), splat(-127.5f));
    vec n = (x - 0.5f + 12582912.0f) - 12582912.0f, f = x - n;
#endif
    vec p = 1.8775767e-3f * f + 8.9893401e-3f;
    p = p * f + 5.5826318e-2f;
    p = p * f + 2.4015361e-1f;
    p = p * f + 6.9315308e-1f;
    p = p * f + 9.9999993e-1f;
#ifdef __AVX512DQ__
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
#endif
}
#define LOG2E 1.44269504f

/* The sums of LANES vectors, as one vector. */
INLINE vec sums(const vec *v) {
#if defined(__AVX512DQ__)
    __m512 a[16];
    for (int i = 0; i < 16; i++)
        a[i] = (__m512)v[i];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];
        a[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    }
    for (int i = 0; i < 2; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88),
                              _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
#elif defined(__AVX2__)
    __m256 a[8];
    for (int i = 0; i < 8; i++)
        a[i] = (__m256)v[i];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        a[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return (vec)_mm256_add_ps(_mm256_permute2f128_ps(a[0], a[1], 0x20),
                              _mm256_permute2f128_ps(a[0], a[1], 0x31));
#else
    vec all;
    for (int i = 0; i < LANES; i++)
        all[i] = sum(v[i]);
    return all;
#endif
}
