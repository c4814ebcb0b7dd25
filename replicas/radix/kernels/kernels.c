/* What a decoder layer computes on a CPU, compiled by native.py for the machine it runs on.
 *
 * In float32 everywhere; in bfloat16 where the CPU multiplies it: then weights, KV and what enters
 * a product are bfloat16; sums, norms, rotations, softmax and the residual stream stay float32.
 *
 * All arrays are contiguous. Rows are tokens. Threads are those of the OpenMP runtime that PyTorch
 * has loaded already, so that the two never compete.
 */
#include <omp.h>

#include "step.h"
#include "vector.h"

#define BAND 192    /* rows, and */
#define DEPTH 768   /* k, that meet a panel while it is in cache */
#define WIDEST 4096 /* k of a panel that is widened on the stack */
#define AHEAD 4096  /* bytes of weights that are on their way */
#define SPAN 256    /* tokens of context whose scores are folded at once */
#define QUERIES 96  /* rows of queries that meet them while they are in cache */

#define STEP 1
#define X float
#define OPERAND vec
#define SPLAT(p) splat(*(p))
#define MULTIPLY_ADD(sum, a, b) ((sum) + (a) * (b))
#define LOAD_SOME(p, left) load(p)
#define PUT put_float32

#define OF float32
#define W float
#define LOAD_ROW(b0, b1, w, stride, vectors) b0 = load(w), b1 = load(w + (vectors - 1) * LANES)
#include "tile.h"
#define OF widened /* float32 times bfloat16 */
#define W bf16
#define LOAD_ROW(b0, b1, w, stride, vectors) b0 = widen(w), b1 = widen(w + (vectors - 1) * LANES)
#include "tile.h"

/* Many rows share one widening of a panel. */
#define SHORT_CUT(from, k, depth, panel, to, width, how, count, vectors)                           \
    if (count > 2 * TILE && depth <= WIDEST) {                                                     \
        float wide[depth * PANEL] __attribute__((aligned(64)));                                    \
        for (long i = 0; i < depth * PANEL; i += LANES)                                            \
            store(wide + i, widen(panel + i));                                                     \
        tiles_float32(from, k, depth, wide, PANEL, to, width, how, count, vectors);                \
        continue;                                                                                  \
    }
#define KIND widened
#define W bf16
#include "product.h"
#undef KIND
#undef W
#undef SHORT_CUT
#define SHORT_CUT(...)
#define KIND float32
#define ROWWISE float32
#define MULTIPLY(x, rows, k, w, y, n, mode)                                                        \
    if ((w)->widened)                                                                              \
        multiply_widened(x, rows, k, (w)->panels, y, n, mode);                                     \
    else                                                                                           \
        multiply_float32(x, rows, k, (w)->panels, y, n, mode)
#define W float
#include "product.h"
#include "rows.h"
#include "attend_chunk.h"
#include "attend.h"
#include "layers.h"

/* What native.py has to know. */
int lanes(void) { return LANES; }
void release_threads(void) { omp_pause_resource_all(omp_pause_soft); }
int has_bfloat16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512BF16__
#undef STEP
#undef X
#undef OPERAND
#undef SPLAT
#undef MULTIPLY_ADD
#undef LOAD_SOME
#undef PUT
#undef KIND
#undef ROWWISE
#undef MULTIPLY
#undef W

#define STEP 2 /* an instruction multiplies pairs, and adds both products */
#define X bf16
#define OPERAND __m512bh
#define SPLAT(p) ((__m512bh)_mm512_set1_epi32(*(const pair *)(p)))
#define MULTIPLY_ADD(sum, a, b) ((vec)_mm512_dpbf16_ps((__m512)(sum), a, b))
#define LOAD_SOME(p, left) load_some(p, left)
#define PUT put_bfloat16
typedef int32_t pair __attribute__((aligned(2), may_alias));

INLINE __m512bh load_some(const bf16 *p, long left) { /* 16 or, of what there is, 32 */
    return left < 32 ? (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i_u *)p))
                     : (__m512bh)_mm512_loadu_si512(p);
}

#define OF bfloat16
#define W bf16
#define LOAD_ROW(b0, b1, w, stride, vectors)                                                       \
    b0 = (__m512bh)_mm512_loadu_si512(w),                                                          \
    b1 = (__m512bh)_mm512_loadu_si512(w + (vectors - 1) * LANES * STEP)
#include "tile.h"

/* Rows of pairs out of two rows, as they are in the pool. */
INLINE __m512bh interleave(__m512i a, __m512i b, int first) {
    const short n = first;
    const __m512i order = (__m512i)(__v32hi){
        n,      n + 32, n + 1,  n + 33, n + 2,  n + 34, n + 3,  n + 35, n + 4,  n + 36, n + 5,
        n + 37, n + 6,  n + 38, n + 7,  n + 39, n + 8,  n + 40, n + 9,  n + 41, n + 10, n + 42,
        n + 11, n + 43, n + 12, n + 44, n + 13, n + 45, n + 14, n + 46, n + 15, n + 47};
    return (__m512bh)_mm512_permutex2var_epi16(a, order, b);
}
#define OF interleaved
#define W bf16
#define LOAD_ROW(b0, b1, w, stride, vectors)                                                       \
    {                                                                                              \
        long left = vectors * LANES;                                                               \
        __m512i upper = (__m512i)load_some(w, left);                                               \
        __m512i lower = (__m512i)load_some(w + stride / 2, left);                                  \
        b0 = interleave(upper, lower, 0), b1 = interleave(upper, lower, 16);                       \
    }
#include "tile.h"

#define KIND bfloat16
#define ROWWISE interleaved
#define MULTIPLY(x, rows, k, w, y, n, mode) multiply_bfloat16(x, rows, k, (w)->panels, y, n, mode)
#define W bf16
#include "product.h"
#include "rows.h"
#include "attend_chunk.h"
#include "attend.h"
#include "layers.h"
#endif
