/* What a decoder layer does between its large matrix products, and the small products themselves,
 * in float32 on a CPU. Compiled by native.py for the machine it runs on.
 *
 * All arrays are contiguous. Rows are tokens. Threads are those of the OpenMP runtime that PyTorch
 * has loaded already, so that the two never compete.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float f8 __attribute__((vector_size(32)));
typedef float f8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint16_t h8u __attribute__((vector_size(16), aligned(2), may_alias));

#define PANEL 16 /* columns of a weight panel: two vectors */
#define TILE 6   /* rows of x that share one pass over a panel: all of AVX2's registers */
#define DEPTH 576
#define ROWS 96
#define CHUNK 32 /* rows of a prefill that meet a stretch of context together */
#define SPAN 64  /* tokens of that stretch; the largest block */

static inline f8 load(const float *p) { return *(const f8u *)p; }
static inline void store(float *p, f8 v) { *(f8u *)p = v; }
static inline f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; }
static inline f8 widen(const uint16_t *p) {
    return (f8)(__builtin_convertvector(*(const h8u *)p, u8) << 16);
}
static inline f8 pick(i8 mask, f8 yes, f8 no) {
    return (f8)((mask & (i8)yes) | (~mask & (i8)no));
}
static inline float sum(f8 v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

/* exp, to 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes). */
static inline f8 exp8(f8 x) {
    const f8 low = splat(-87.3f), high = splat(88.0f);
    x = pick(x < low, low, x);
    x = pick(x > high, high, x);
    f8 shifted = x * splat(1.44269504f) + splat(12582912.0f); /* rounds to nearest */
    f8 n = shifted - splat(12582912.0f);
    f8 r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    f8 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    i8 bits = (i8)p + (__builtin_convertvector(n, i8) << 23);
    return (f8)bits;
}

/* y[rows, PANEL] (+)= x[rows, k] w[k, PANEL]; `rows` is at most TILE and known to the compiler. */
#define TILE_PRODUCT(NAME, TYPE, WIDEN)                                                            \
    static inline __attribute__((always_inline)) void NAME##_rows(                                 \
        const float *x, long x_stride, long k, const TYPE *w, long w_stride, float *y,             \
        long y_stride, int add, const int rows) {                                                  \
        f8 a[TILE][2] = {0}, b[TILE][2] = {0};                                                     \
        long i = 0;                                                                                \
        /* Few rows need more sums than they have, to hide the latency of an addition. */          \
        for (; rows <= 3 && i + 2 <= k; i += 2)                                                    \
            for (int r = 0; r < rows; r++) {                                                       \
                f8 s = splat(x[r * x_stride + i]), t = splat(x[r * x_stride + i + 1]);             \
                a[r][0] += s * WIDEN(w + i * w_stride);                                               \
                a[r][1] += s * WIDEN(w + i * w_stride + 8);                                           \
                b[r][0] += t * WIDEN(w + (i + 1) * w_stride);                                          \
                b[r][1] += t * WIDEN(w + (i + 1) * w_stride + 8);                                          \
            }                                                                                      \
        for (; i < k; i++)                                                                         \
            for (int r = 0; r < rows; r++) {                                                       \
                f8 s = splat(x[r * x_stride + i]);                                                 \
                a[r][0] += s * WIDEN(w + i * w_stride);                                               \
                a[r][1] += s * WIDEN(w + i * w_stride + 8);                                           \
            }                                                                                      \
        for (int r = 0; r < rows; r++)                                                             \
            for (int j = 0; j < 2; j++) {                                                          \
                float *to = y + r * y_stride + j * 8;                                              \
                f8 total = rows <= 3 ? a[r][j] + b[r][j] : a[r][j];                                \
                store(to, add ? total + load(to) : total);                                         \
            }                                                                                      \
    }                                                                                              \
    static void NAME(const float *x, long x_stride, long k, const TYPE *w, long w_stride, float *y,  \
                     long y_stride, int add, long rows) {                                          \
        for (; rows >= TILE; rows -= TILE, x += TILE * x_stride, y += TILE * y_stride)             \
            NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, TILE);                                \
        switch (rows) {                                                                            \
        case 5: NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, 5); break;                        \
        case 4: NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, 4); break;                        \
        case 3: NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, 3); break;                        \
        case 2: NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, 2); break;                        \
        case 1: NAME##_rows(x, x_stride, k, w, w_stride, y, y_stride, add, 1); break;                        \
        }                                                                                          \
    }

TILE_PRODUCT(tile_bfloat16, uint16_t, widen)
TILE_PRODUCT(tile_float32, float, load)

/* y[rows, n] = x[rows, k] w^T for w packed [n / PANEL, k, PANEL]. Rows and k are cut so that what a
 * thread works on stays in its cache; many rows share one widening of a bfloat16 panel. */
#define PRODUCT(NAME, TYPE, PIECE)                                                                 \
    void NAME(const float *x, long rows, long k, const TYPE *w, float *y, long n) {                \
        _Pragma("omp parallel") {                                                                  \
            float wide[DEPTH * PANEL] __attribute__((aligned(64)));                                \
            (void)wide;                                                                            \
            for (long first = 0; first < rows; first += ROWS) {                                    \
                long count = rows - first < ROWS ? rows - first : ROWS;                            \
                _Pragma("omp for schedule(static) nowait") for (long p = 0; p < n / PANEL; p++) {  \
                    for (long at = 0; at < k; at += DEPTH) {                                       \
                        long depth = k - at < DEPTH ? k - at : DEPTH;                              \
                        const TYPE *panel = w + (p * k + at) * PANEL;                              \
                        const float *from = x + first * k + at;                                    \
                        float *to = y + first * n + p * PANEL;                                     \
                        PIECE                                                                      \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

PRODUCT(product_float32, float, tile_float32(from, k, depth, panel, PANEL, to, n, at > 0, count);)
PRODUCT(product_bfloat16, uint16_t,
        if (count <= TILE) {
            tile_bfloat16(from, k, depth, panel, PANEL, to, n, at > 0, count);
        } else {
            for (long i = 0; i < depth * PANEL; i += 8)
                store(wide + i, widen(panel + i));
            tile_float32(from, k, depth, wide, PANEL, to, n, at > 0, count);
        })

/* x += delta (unless NULL); out = x / rms(x) * weight. */
void add_norm(float *x, const float *delta, const float *weight, float eps, float *out, long rows,
              long width) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (long r = 0; r < rows; r++) {
        float *row = x + r * width, *to = out + r * width;
        f8 squares = {0};
        for (long i = 0; i < width; i += 8) {
            f8 v = load(row + i);
            if (delta) {
                v += load(delta + r * width + i);
                store(row + i, v);
            }
            squares += v * v;
        }
        f8 scale = splat(1.0f / sqrtf(sum(squares) / width + eps));
        for (long i = 0; i < width; i += 8)
            store(to + i, load(weight + i) * (load(row + i) * scale));
    }
}

/* out[rows, width] = silu(gate) * up, of gate_up[rows, 2 * width]. */
void swiglu(const float *gate_up, float *out, long rows, long width) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (long r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += 8) {
            f8 g = load(gate + i);
            store(out + r * width + i, g / (splat(1.0f) + exp8(-g)) * load(up + i));
        }
    }
}

static inline void rotate(float *head, const float *weight, float eps, const float *cos,
                          const float *sin, long dim) {
    long half = dim / 2;
    if (weight) {
        f8 squares = {0};
        for (long i = 0; i < dim; i += 8)
            squares += load(head + i) * load(head + i);
        f8 scale = splat(1.0f / sqrtf(sum(squares) / dim + eps));
        for (long i = 0; i < dim; i += 8)
            store(head + i, load(weight + i) * (load(head + i) * scale));
    }
    for (long i = 0; i < half; i += 8) {
        f8 a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
}

/* Normalise (unless the weights are NULL) and rotate the queries and keys of qkv[rows, heads +
 * 2 * kv_heads, dim] in place, and put keys and values into the slots of the pool. */
void rotate_and_store(float *qkv, const float *q_norm, const float *k_norm, float eps,
                      const float *cos, const float *sin, const int64_t *slots, float *keys,
                      float *values, long rows, long heads, long kv_heads, long dim) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (long r = 0; r < rows; r++) {
        float *row = qkv + r * (heads + 2 * kv_heads) * dim;
        const float *c = cos + r * dim / 2, *s = sin + r * dim / 2;
        for (long h = 0; h < heads; h++)
            rotate(row + h * dim, q_norm, eps, c, s, dim);
        float *k = row + heads * dim, *v = k + kv_heads * dim;
        for (long h = 0; h < kv_heads; h++)
            rotate(k + h * dim, k_norm, eps, c, s, dim);
        memcpy(keys + slots[r] * kv_heads * dim, k, kv_heads * dim * sizeof(float));
        memcpy(values + slots[r] * kv_heads * dim, v, kv_heads * dim * sizeof(float));
    }
}

/* Turn `seen` of the scores s[wide] into weights, those beyond into zero; the running softmax (Milakov
 * and Gimelshein 2018) moves on: its largest score, its sum, and what it has accumulated. */
static inline void fold(float *s, long seen, long wide, float *top, float *total, float *acc,
                        long dim) {
    for (long t = seen; t < wide; t++)
        s[t] = -INFINITY;
    f8 best8 = splat(*top);
    for (long t = 0; t < wide; t += 8)
        best8 = pick(load(s + t) > best8, load(s + t), best8);
    float best = best8[0];
    for (long j = 1; j < 8; j++)
        best = best8[j] > best ? best8[j] : best;
    if (best == -INFINITY) {
        memset(s, 0, wide * sizeof(float));
        return;
    }
    if (best > *top) {
        float fade = expf(*top - best);
        *total *= fade;
        for (long i = 0; i < dim; i += 8)
            store(acc + i, load(acc + i) * splat(fade));
        *top = best;
    }
    f8 sums = {0};
    for (long t = 0; t < wide; t += 8) {
        f8 e = exp8(load(s + t) - splat(best));
        e = pick(load(s + t) > splat(-INFINITY), e, splat(0));
        store(s + t, e);
        sums += e;
    }
    *total += sum(sums);
}

/* One block of the pool against the queries of one KV head. */
static inline void attend_block(const float *q, const float *k, const float *v, long stride,
                                long tokens, long group, long dim, float scale, float *top,
                                float *total, float *acc) {
    long wide = (tokens + 7) / 8 * 8;
    for (long g = 0; g < group; g++) {
        float s[SPAN] __attribute__((aligned(32)));
        const float *query = q + g * dim;
        for (long t = 0; t < tokens; t++) {
            f8 a = {0}, b = {0};
            const float *key = k + t * stride;
            for (long i = 0; i < dim; i += 16) {
                a += load(query + i) * load(key + i);
                b += load(query + i + 8) * load(key + i + 8);
            }
            s[t] = sum(a + b) * scale;
        }
        float *out = acc + g * dim;
        fold(s, tokens, wide, top + g, total + g, out, dim);
        for (long i = 0; i < dim; i += 16) {
            f8 a = load(out + i), b = load(out + i + 8);
            for (long t = 0; t < tokens; t++) {
                a += splat(s[t]) * load(v + t * stride + i);
                b += splat(s[t]) * load(v + t * stride + i + 8);
            }
            store(out + i, a);
            store(out + i + 8, b);
        }
    }
}

/* Attention of consecutive tokens of one sequence, the first at `start`, over its block table, which
 * holds them too. Layouts as in `attend`; out is [rows, heads, dim]. A tile of rows meets SPAN tokens
 * of context at a time, keys transposed, so that both products are those of TILE_PRODUCT. */
void attend_chunk(const float *qkv, long width, const float *keys, const float *values,
                  const int64_t *table, float *out, long rows, long start, long heads,
                  long kv_heads, long dim, long block, float scale) {
    long group = heads / kv_heads, stride = kv_heads * dim, tiles = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel
    {
        float *room = aligned_alloc(64, (2 * CHUNK * group * dim + CHUNK * group * (SPAN + 2) +
                                         2 * SPAN * dim + 64) / 16 * 64);
        float *q = room, *acc = q + CHUNK * group * dim, *s = acc + CHUNK * group * dim;
        float *kt = s + CHUNK * group * SPAN, *v = kt + SPAN * dim;
        float *top = v + SPAN * dim, *total = top + CHUNK * group;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tiles * kv_heads; task++) {
            long h = task % kv_heads, first = (tiles - 1 - task / kv_heads) * CHUNK; /* long first */
            long count = rows - first < CHUNK ? rows - first : CHUNK, n = count * group;
            for (long r = 0; r < count; r++)
                for (long i = 0; i < group * dim; i += 8)
                    store(q + r * group * dim + i,
                          load(qkv + ((first + r) * width + h * group) * dim + i) * splat(scale));
            memset(acc, 0, n * dim * sizeof(float));
            for (long i = 0; i < n; i++)
                top[i] = -INFINITY, total[i] = 0;
            long end = start + first + count; /* context of the last row */
            for (long at = 0; at < end; at += SPAN) {
                long span = end - at < SPAN ? end - at : SPAN, wide = (span + 15) / 16 * 16;
                for (long t = 0; t < wide; t++) {
                    long j = at + t < end ? at + t : end - 1; /* what is beyond is masked */
                    long from = (table[j / block] * block + j % block) * stride + h * dim;
                    for (long i = 0; i < dim; i++)
                        kt[(t / PANEL * dim + i) * PANEL + t % PANEL] = keys[from + i];
                    memcpy(v + t * dim, values + from, dim * sizeof(float));
                }
                for (long p = 0; p < wide; p += PANEL)
                    tile_float32(q, dim, dim, kt + p * dim, PANEL, s + p, SPAN, 0, n);
                for (long i = 0; i < n; i++) {
                    long seen = start + first + i / group + 1 - at; /* of this span, by this row */
                    seen = seen < 0 ? 0 : seen < span ? seen : span;
                    fold(s + i * SPAN, seen, wide, top + i, total + i, acc + i * dim, dim);
                }
                for (long d = 0; d < dim; d += PANEL)
                    tile_float32(s, SPAN, wide, v + d, dim, acc + d, dim, 1, n);
            }
            for (long i = 0; i < n; i++)
                for (long d = 0; d < dim; d += 8)
                    store(out + ((first + i / group) * heads + h * group + i % group) * dim + d,
                          load(acc + i * dim + d) / splat(total[i]));
        }
        free(room);
    }
}

/* Attention of rows of one token each over their block tables, in place in the pool.
 *
 * Row r has contexts[r] tokens in blocks tables[starts[r]...]. Queries are the first `heads` heads
 * of qkv[rows, width, dim]; pool tensors are [blocks, block, kv_heads, dim]. A row's context is cut
 * into `pieces` that are attended to apart and joined, so that one long row occupies all threads.
 * `partial` has room for [rows, kv_heads, pieces, group, dim + 2] floats. */
void attend(const float *qkv, long width, const float *keys, const float *values,
            const int64_t *tables, const int64_t *starts, const int64_t *contexts, float *out,
            float *partial, long rows, long heads, long kv_heads, long dim, long block,
            long pieces, float scale) {
    long group = heads / kv_heads, stride = kv_heads * dim, record = group * (dim + 2);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (long task = 0; task < rows * kv_heads * pieces; task++) {
            long piece = task % pieces, h = task / pieces % kv_heads, r = task / pieces / kv_heads;
            long blocks = (contexts[r] + block - 1) / block;
            long first = blocks * piece / pieces, last = blocks * (piece + 1) / pieces;
            float *acc = partial + task * record, *top = acc + group * dim, *total = top + group;
            memset(acc, 0, record * sizeof(float));
            for (long g = 0; g < group; g++)
                top[g] = -INFINITY;
            for (long b = first; b < last; b++) {
                long at = tables[starts[r] + b] * block * stride + h * dim;
                long left = contexts[r] - b * block;
                attend_block(qkv + (r * width + h * group) * dim, keys + at, values + at, stride,
                             left < block ? left : block, group, dim, scale, top, total, acc);
            }
        }
#pragma omp for schedule(static)
        for (long task = 0; task < rows * kv_heads; task++) {
            const float *acc = partial + task * pieces * record;
            for (long g = 0; g < group; g++) {
                float best = -INFINITY, sums = 0;
                for (long p = 0; p < pieces; p++) {
                    float top = acc[p * record + group * dim + g];
                    best = top > best ? top : best;
                }
                float *to = out + task * group * dim + g * dim;
                memset(to, 0, dim * sizeof(float));
                for (long p = 0; p < pieces; p++) {
                    const float *part = acc + p * record;
                    float weight = expf(part[group * dim + g] - best);
                    sums += weight * part[group * dim + group + g];
                    for (long i = 0; i < dim; i += 8)
                        store(to + i, load(to + i) + splat(weight) * load(part + g * dim + i));
                }
                for (long i = 0; i < dim; i += 8)
                    store(to + i, load(to + i) / splat(sums));
            }
        }
    }
}
