/* What is computed row by row. Included once for each KIND of X, the type of what is handed on. */
/* out = x / rms(x) * weight. */
void JOINED(norm, KIND)(const float *x, const float *weight, float eps, X *out, long rows,
                        long width) {
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * width;
        vec squares = {0};
        for (long i = 0; i < width; i += LANES)
            squares += load(row + i) * load(row + i);
        float scale = 1.0f / sqrtf(sum(squares) / width + eps);
        for (long i = 0; i < width; i += LANES)
            PUT(out + r * width + i, load(weight + i) * (load(row + i) * scale));
    }
}

#if STEP == 1
/* Half a head may be less than a vector: the compiler finds its own. */
static void rotate(float *restrict head, const float *restrict weight, float eps,
                   const float *restrict cos, const float *restrict sin, long dim) {
    long half = dim / 2;
    if (weight) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < dim; i++)
            squares += head[i] * head[i];
        float scale = 1.0f / sqrtf(squares / dim + eps);
        for (long i = 0; i < dim; i++)
            head[i] = weight[i] * (head[i] * scale);
    }
    float *restrict upper = head + half;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float a = head[i], b = upper[i];
        head[i] = a * cos[i] - b * sin[i];
        upper[i] = b * cos[i] + a * sin[i];
    }
}
#endif

/* Add the bias to qkv[rows, heads + 2 * kv_heads, dim], normalise its queries and keys, rotate
 * them, all in place, and put keys and values into the slots of the pool. Bias and norms may be
 * NULL. */
void JOINED(rotate_and_store, KIND)(float *qkv, const float *bias, const float *q_norm,
                                    const float *k_norm, float eps, const float *cos,
                                    const float *sin, const int64_t *slots,
                                    X *keys, X *values, long rows, long heads, long kv_heads,
                                    long dim) {
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
        float *row = qkv + r * (heads + 2 * kv_heads) * dim;
        for (long i = 0; bias && i < (heads + 2 * kv_heads) * dim; i += LANES)
            store(row + i, load(row + i) + load(bias + i));
        const float *c = cos + r * dim / 2, *s = sin + r * dim / 2;
        for (long h = 0; h < heads; h++)
            rotate(row + h * dim, q_norm, eps, c, s, dim);
        float *k = row + heads * dim, *v = k + kv_heads * dim;
        for (long h = 0; h < kv_heads; h++)
            rotate(k + h * dim, k_norm, eps, c, s, dim);
        for (long i = 0; i < kv_heads * dim; i += LANES) {
            PUT(keys + slots[r] * kv_heads * dim + i, load(k + i));
            PUT(values + slots[r] * kv_heads * dim + i, load(v + i));
        }
    }
}

/* Turn `seen` of the scores s[wide], of base 2, into weights in place, those beyond into zero; the
 * running softmax (Milakov and Gimelshein 2018) moves on: its largest score, its sum, and what it
 * has accumulated. Weights of type X take the front of the memory. */
static inline void JOINED(fold, KIND)(float *s, long seen, long wide, float *top, float *total,
                                      float *acc, long dim) {
    X *weights = (X *)s;
    if (seen <= 0) {
        memset(weights, 0, wide * sizeof(X));
        return;
    }
    for (long t = seen; t < wide; t++)
        s[t] = -INFINITY;
    vec best = splat(*top), all = {0};
    for (long t = 0; t < wide; t += LANES)
        best = larger(load(s + t), best);
    float most = largest(best);
    if (most > *top) {
        float fade = exp2f(*top - most);
        *total *= fade;
        for (long i = 0; i < dim; i += LANES)
            store(acc + i, load(acc + i) * fade);
        *top = most;
    }
    for (long t = 0; t < wide; t += LANES) {
        vec e = power(load(s + t) - most);
        PUT(weights + t, e);
        all += e;
    }
    *total += sum(all);
}
