/* Attention of single tokens. Included once for each KIND of X, the type of queries and KV. */

/* Scores of queries q[heads, dim] with `tokens` keys of rows of kv_heads: s[heads, SPAN + LANES],
 * of which up to LANES more than `tokens` are written. Keys are read in the order they lie in, and
 * the values of these tokens, wanted `soon`, brought near. */
INLINE void JOINED(score, KIND)(const X *q, const X *keys, const X *soon, long tokens,
                                long kv_heads, long group, long dim, float *s) {
    vec parts[kv_heads * group][LANES];
    for (long t = 0; t < tokens; t += LANES) {
        for (long j = 0; j < LANES; j++) {
            const X *key = keys + (t + j < tokens ? t + j : t) * kv_heads * dim, *query = q;
            for (long h = 0, i = 0; h < kv_heads; h++, key += dim)
                for (long g = 0; g < group; g++, i++, query += dim) {
                    vec all = {0};
                    for (long d = 0; d < dim; d += LANES * STEP)
                        all = MULTIPLY_ADD(all, LOAD_SOME(query + d, dim - d),
                                           LOAD_SOME(key + d, dim - d));
                    parts[i][j] = all;
                }
            fetch(soon + (t + j < tokens ? t + j : t) * kv_heads * dim, kv_heads * dim * sizeof(X));
        }
        for (long i = 0; i < kv_heads * group; i++)
            store(s + i * (SPAN + LANES) + t, sums(parts[i]));
    }
}

/* Attention of rows of one token each over their block tables, in place in the pool.
 *
 * Row r has contexts[r] tokens in blocks tables[starts[r]...]. Queries are the first `heads` heads
 * of qkv[rows, width, dim]; pool tensors are [blocks, block, kv_heads, dim]. A row's context is cut
 * into pieces that are attended to apart and joined, so that one long row occupies all threads:
 * piece p is blocks [pieces[p][1], pieces[p][2]) of row pieces[p][0], and all those of a row follow
 * each other. `partial` has room for [pieces, heads, dim + 2] floats. */
void JOINED(attend, KIND)(const float *qkv, long width, const X *keys, const X *values,
                          const int64_t *tables, const int64_t *starts, const int64_t *contexts,
                          const int64_t (*pieces)[3], long count, X *out, float *partial,
                          long heads, long kv_heads, long dim, long block, float scale) {
    long group = heads / kv_heads, stride = kv_heads * dim, record = heads * (dim + 2);
    long pitch = (SPAN + LANES) * sizeof(float) / sizeof(X); /* of rows of weights */
    long even = (block + 1) / 2 * 2;
    long together = SPAN / even; /* blocks whose scores are folded at once */
    X q[heads * dim] __attribute__((aligned(64)));
    float s[heads * (SPAN + LANES)] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic)
    for (long p = 0; p < count; p++) {
        long r = pieces[p][0];
        const int64_t *table = tables + starts[r];
        float *acc = partial + p * record, *top = acc + heads * dim, *total = top + heads;
        for (long i = 0; i < heads * dim; i += LANES)
            PUT(q + i, load(qkv + r * width * dim + i) * (scale * LOG2E));
        memset(acc, 0, record * sizeof(float));
        for (long h = 0; h < heads; h++)
            top[h] = -INFINITY;
        for (long b = pieces[p][1]; b < pieces[p][2]; b += together) {
            long last = b + together < pieces[p][2] ? b + together : pieces[p][2], seen = 0;
            for (long i = b; i < last; i++) {
                long left = contexts[r] - i * block, tokens = left < block ? left : block;
                const X *k = keys + table[i] * block * stride;
                const X *soon = values + table[i] * block * stride;
                float *to = s + (i - b) * even;
                JOINED(score, KIND)(q, k, soon, tokens, kv_heads, group, dim, to);
                seen = (i - b) * even + tokens;
                if (even > block)
                    for (long h = 0; h < heads; h++)
                        s[h * (SPAN + LANES) + (i - b) * even + block] = -INFINITY;
            }
            for (long h = 0; h < heads; h++)
                JOINED(fold, KIND)(s + h * (SPAN + LANES), seen,
                                   (seen + LANES - 1) / LANES * LANES, top + h, total + h,
                                   acc + h * dim, dim);
            for (long i = b; i < last; i++) {
                long left = contexts[r] - i * block, tokens = left < block ? left : block;
                long whole = tokens / STEP * STEP; /* an odd last one is paired with itself, */
                for (long h = 0; h < kv_heads; h++)
                    for (long d = 0; d < dim; d += PANEL) {
                        const X *v = values + table[i] * block * stride + h * dim + d;
                        const X *weights = (const X *)s + (i - b) * even + h * group * pitch;
                        float *to = acc + h * group * dim + d;
                        int vectors = dim - d < PANEL ? 1 : 2;
                        JOINED(tiles, ROWWISE)(weights, pitch, whole, v, STEP * stride, to, dim,
                                               ADD, group, vectors);
                        if (whole < tokens) /* which weighs nothing */
                            JOINED(tiles, ROWWISE)(weights + whole, pitch, STEP,
                                                   v + whole * stride, 0, to, dim, ADD, group,
                                                   vectors);
                    }
            }
        }
    }
#pragma omp for schedule(static)
    for (long p = 0; p < count; p++) {
        if (p && pieces[p][0] == pieces[p - 1][0])
            continue; /* joined with the first piece of its row */
        long r = pieces[p][0], end = p;
        while (end < count && pieces[end][0] == r)
            end++;
        for (long h = 0; h < heads; h++) {
            float best = -INFINITY, all = 0;
            for (long i = p; i < end; i++)
                best = fmaxf(best, partial[i * record + heads * dim + h]);
            float *joined = partial + p * record + h * dim;
            for (long i = p; i < end; i++) {
                const float *part = partial + i * record;
                float weight = exp2f(part[heads * dim + h] - best);
                all += weight * part[heads * dim + heads + h];
                for (long d = 0; d < dim; d += LANES)
                    store(joined + d, (i > p ? load(joined + d) : splat(0)) +
                                          load(part + h * dim + d) * weight);
            }
            for (long d = 0; d < dim; d += LANES)
                PUT(out + (r * heads + h) * dim + d, load(joined + d) * (1.0f / all));
        }
    }
}
