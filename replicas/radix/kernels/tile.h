/* Small products in registers. Included once for each kind OF operands: X of x, W of w, of which
 * MULTIPLY_ADD takes STEP values of k at a time. */

/* y[rows, vectors] (+)= x[rows, k] w[k, vectors], or, of two vectors of GATED, y[rows, vector] =
 * silu(first) * second, which is of type X. The compiler knows `rows`, `vectors` and `mode`. */
INLINE void JOINED(tile, OF)(const X *x, long x_stride, long k, const W *w, long w_stride, void *y,
                             long y_stride, const enum mode mode, const int rows,
                             const int vectors) {
    vec a[TILE][2] = {0};
#pragma GCC unroll 1
    for (long i = 0; i < k; i += STEP, w += w_stride) {
        OPERAND b0, b1;
        LOAD_ROW(b0, b1, w, w_stride, vectors);
        for (long n = 0; n < vectors * LANES * STEP; n += 64 / (long)sizeof(W))
            __builtin_prefetch(w + AHEAD / (PANEL * STEP * (long)sizeof(W)) * w_stride + n);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            OPERAND s = SPLAT(x + r * x_stride + i);
            a[r][0] = MULTIPLY_ADD(a[r][0], s, b0);
            if (vectors == 2)
                a[r][1] = MULTIPLY_ADD(a[r][1], s, b1);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        if (mode == GATED)
            PUT((X *)y + r * y_stride, a[r][0] / (1.0f + power(a[r][0] * -LOG2E)) * a[r][1]);
        else
            for (int j = 0; j < vectors; j++) {
                float *to = (float *)y + r * y_stride + j * LANES;
                store(to, mode == ADD ? a[r][j] + load(to) : a[r][j]);
            }
}

#define ROWS_CASE(n)                                                                               \
    case n: JOINED(tile, OF)(x, x_stride, k, w, w_stride, y, y_stride, mode, n, vectors); break;

INLINE void JOINED(tiles_of, OF)(const X *x, long x_stride, long k, const W *w, long w_stride,
                                 void *y, long y_stride, const enum mode mode, long rows,
                                 const int vectors) {
    const long width = mode == GATED ? sizeof(X) : sizeof(float);
    for (; rows > 0; rows -= TILE, x += TILE * x_stride, y = (char *)y + TILE * y_stride * width)
        switch (rows < TILE ? rows : TILE) {
            ROWS_CASE(1)
            ROWS_CASE(2)
            ROWS_CASE(3)
            ROWS_CASE(4)
            ROWS_CASE(5)
            ROWS_CASE(6)
#if TILE == 12
            ROWS_CASE(7)
            ROWS_CASE(8)
            ROWS_CASE(9)
            ROWS_CASE(10)
            ROWS_CASE(11)
            ROWS_CASE(12)
#endif
        }
}

/* The same for any number of rows. */
static void JOINED(tiles, OF)(const X *x, long x_stride, long k, const W *w, long w_stride, void *y,
                              long y_stride, enum mode mode, long rows, int vectors) {
#define TILES(mode, vectors)                                                                       \
    JOINED(tiles_of, OF)(x, x_stride, k, w, w_stride, y, y_stride, mode, rows, vectors)
    if (mode == GATED)
        TILES(GATED, 2);
    else if (mode == ADD && vectors == 2)
        TILES(ADD, 2);
    else if (mode == ADD)
        TILES(ADD, 1);
    else if (vectors == 2)
        TILES(SET, 2);
    else
        TILES(SET, 1);
#undef TILES
}

#undef OF
#undef W
#undef LOAD_ROW
