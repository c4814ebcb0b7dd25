/* Included once for each KIND of X of x and W of w. */

/* y[rows, n] (+)= x[rows, k] w^T for w packed [n / PANEL, k / STEP, PANEL, STEP], the last panel
 * filled up with zeros; or GATED to y[rows, n / 2], a panel being a vector of gates and one of what
 * they gate. Rows and k are cut so that what a thread works on stays in its cache. */
static void JOINED(multiply, KIND)(const X *x, long rows, long k, const W *w, void *y, long n,
                                   enum mode mode) {
    long deep = mode == GATED ? k : DEPTH, width = mode == GATED ? n / 2 : n;
    long step = mode == GATED ? LANES * sizeof(X) : PANEL * sizeof(float);
    for (long first = 0; first < rows; first += BAND) {
        long count = rows - first < BAND ? rows - first : BAND;
        char *band = (char *)y + first * width * (mode == GATED ? sizeof(X) : sizeof(float));
        for (long at = 0; at < k; at += deep) {
            long depth = k - at < deep ? k - at : deep;
#pragma omp for schedule(static) nowait
            for (long p = 0; p < (n + PANEL - 1) / PANEL; p++) {
                const X *from = x + first * k + at;
                const W *panel = w + (p * k + at) * PANEL;
                void *to = band + p * step;
                enum mode how = at ? ADD : mode;
                int vectors = n - p * PANEL < PANEL ? 1 : 2;
                SHORT_CUT(from, k, depth, panel, to, width, how, count, vectors)
                JOINED(tiles, KIND)(from, k, depth, panel, PANEL * STEP, to, width, how, count,
                                    vectors);
            }
        }
    }
#pragma omp barrier
}

void JOINED(product, KIND)(const X *x, long rows, long k, const W *w, void *y, long n, int mode) {
#pragma omp parallel
    JOINED(multiply, KIND)(x, rows, k, w, y, n, mode);
}
