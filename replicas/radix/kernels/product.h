/* Included once for each KIND of X of x and W of w. */

/* y[rows, n] = x[rows, k] w^T for w packed [n / PANEL, k / STEP, PANEL, STEP]; the last panel is
 * filled up with zeros. Rows and k are cut so that what a thread works on stays in its cache. */
void JOINED(product, KIND)(const X *x, long rows, long k, const W *w, float *y, long n) {
#pragma omp parallel
    for (long first = 0; first < rows; first += BAND) {
        long count = rows - first < BAND ? rows - first : BAND;
        for (long at = 0; at < k; at += DEPTH) {
            long depth = k - at < DEPTH ? k - at : DEPTH;
#pragma omp for schedule(static) nowait
            for (long p = 0; p < (n + PANEL - 1) / PANEL; p++)
                JOINED(tiles, KIND)(x + first * k + at, k, depth, w + (p * k + at) * PANEL,
                                    PANEL * STEP, y + first * n + p * PANEL, n, at > 0, count,
                                    n - p * PANEL < PANEL ? 1 : 2);
        }
    }
}
