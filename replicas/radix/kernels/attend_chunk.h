/* Attention of a prefill. Included once for each KIND of X, the type of queries and KV. */

/* Keys and values of a context, packed as the products read them: for each KV head keys
 * [tokens / PANEL, dim / STEP, PANEL, STEP], then values [tokens / STEP, dim, STEP]. What fills up
 * the last panel is zero. */
static void JOINED(pack, KIND)(const X *keys, const X *values, const int64_t *table, X *packed,
                               long end, long kv_heads, long dim, long block) {
    long tokens = (end + PANEL - 1) / PANEL * PANEL;
#pragma omp for schedule(static)
    for (long at = 0; at < tokens; at += PANEL)
        for (long h = 0; h < kv_heads; h++) {
            X *kt = packed + (2 * h * tokens + at) * dim, *v = kt + tokens * dim;
            for (long t = 0; t < PANEL; t++) {
                long j = at + t;
                if (j >= end) {
                    for (long i = 0; i < dim; i++)
                        kt[(i / STEP * PANEL + t) * STEP + i % STEP] =
                            v[(t / STEP * dim + i) * STEP + t % STEP] = 0;
                    continue;
                }
                long from = ((table[j / block] * block + j % block) * kv_heads + h) * dim;
                for (long i = 0; i < dim; i += STEP)
                    for (long e = 0; e < STEP; e++)
                        kt[(i / STEP * PANEL + t) * STEP + e] = keys[from + i + e];
                for (long i = 0; i < dim; i++)
                    v[(t / STEP * dim + i) * STEP + t % STEP] = values[from + i];
            }
        }
}

/* Attention of consecutive tokens of one sequence, the first at `start`, over its block table,
 * which holds them too. Layouts as in `attend`; out is [rows, heads, dim]. `packed` has room for
 * twice the context, a multiple of PANEL, times kv_heads times dim. */
void JOINED(attend_chunk, KIND)(const float *qkv, long width, const X *keys, const X *values,
                                const int64_t *table, X *packed, X *out, long rows, long start,
                                long heads, long kv_heads, long dim, long block, float scale) {
    long group = heads / kv_heads, height = QUERIES > group ? QUERIES / group : 1;
    long tasks = (rows + height - 1) / height, tokens = (start + rows + PANEL - 1) / PANEL * PANEL;
    X q[height * group * dim] __attribute__((aligned(64)));
    float acc[height * group * dim] __attribute__((aligned(64)));
    float s[TILE * SPAN] __attribute__((aligned(64)));
    float top[height * group], total[height * group];
    JOINED(pack, KIND)(keys, values, table, packed, start + rows, kv_heads, dim, block);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < tasks * kv_heads; task++) {
        long h = task % kv_heads, first = (tasks - 1 - task / kv_heads) * height; /* long first */
        long count = rows - first < height ? rows - first : height, n = count * group;
        const X *kt = packed + 2 * h * tokens * dim, *v = kt + tokens * dim;
        for (long r = 0; r < count; r++)
            for (long i = 0; i < group * dim; i += LANES)
                PUT(q + r * group * dim + i,
                                  load(qkv + ((first + r) * width + h * group) * dim + i) *
                                      (scale * LOG2E));
        memset(acc, 0, n * dim * sizeof(float));
        for (long i = 0; i < n; i++)
            top[i] = -INFINITY, total[i] = 0;
        for (long at = 0; at < start + first + count; at += SPAN)
            for (long low = 0; low < n; low += TILE) {
                long high = low + TILE < n ? low + TILE : n;
                /* of this span, by the rows of the tile that see least and most */
                long least = start + first + low / group + 1 - at;
                long most = start + first + (high - 1) / group + 1 - at;
                if (most <= 0)
                    continue;
                long wide = most < SPAN ? (most + PANEL - 1) / PANEL * PANEL : SPAN;
                for (long p = 0; p < wide; p += PANEL)
                    JOINED(tiles, KIND)(q + low * dim, dim, dim, kt + (at + p) * dim,
                                        PANEL * STEP, s + p, SPAN, SET, high - low, 2);
                for (long i = low; i < high; i++) {
                    long seen = least + i / group - low / group;
                    JOINED(fold, KIND)(s + (i - low) * SPAN, seen < wide ? seen : wide, wide,
                                       top + i, total + i, acc + i * dim, dim);
                }
                for (long d = 0; d < dim; d += PANEL)
                    JOINED(tiles, KIND)((const X *)s, SPAN * sizeof(float) / sizeof(X), wide,
                                        v + (at * dim + d * STEP), dim * STEP,
                                        acc + low * dim + d, dim, ADD, high - low,
                                        dim - d < PANEL ? 1 : 2);
            }
        for (long i = 0; i < n; i++)
            for (long d = 0; d < dim; d += LANES)
                PUT(out + ((first + i / group) * heads + h * group + i % group) * dim + d,
                                  load(acc + i * dim + d) * (1.0f / total[i]));
    }
}
