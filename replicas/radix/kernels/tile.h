/* Small products in registers. Included once for each kind OF operands: X of x, W of w, of which
 * MULTIPLY_ADD takes STEP values of k at a time. */

/* y[rows, vectors] (+)= x[rows, k] w[k, vectors]; `rows` and `vectors` are known to the compiler. */
INLINE void JOINED(tile, OF)(const X *x, long x_stride, long k, const W *w, long w_stride,
                               float *y, long y_stride, int add, const int rows,
                               const int vectors) {
    vec a[TILE][2] = {0};
#pragma GCC unroll 1
    for (long i = 0; i < k; i += STEP, w += w_stride) {
        OPERAND b0, b1;
        LOAD_ROW(b0, b1, w, w_stride, vectors);
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
        for (int j = 0; j < vectors; j++) {
            float *to = y + r * y_stride + j * LANES;
            store(to, add ? a[r][j] + load(to) : a[r][j]);
        }
}

#define ROWS_CASE(n)                                                                               \
    case n:                                                                                        \
        if (vectors == 2)                                                                          \
            JOINED(tile, OF)(x, x_stride, k, w, w_stride, y, y_stride, add, n, 2);               \
        else                                                                                       \
            JOINED(tile, OF)(x, x_stride, k, w, w_stride, y, y_stride, add, n, 1);               \
        break;

/* The same for any number of rows. */
static void JOINED(tiles, OF)(const X *x, long x_stride, long k, const W *w, long w_stride,
                                float *y, long y_stride, int add, long rows, int vectors) {
    for (; rows > 0; rows -= TILE, x += TILE * x_stride, y += TILE * y_stride)
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

#undef OF
#undef W
#undef LOAD_ROW
