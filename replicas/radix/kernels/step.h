/* A model and a step of it, as native_ops.py fills them in. */
#pragma once
#include <stdint.h>

struct projection {
    const void *panels;
    long widened; /* bfloat16 that meets float32 */
};

struct layer {
    const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *mlp_norm; /* some may be NULL */
    struct projection qkv, attention_out, gate_up, down;
    void *keys, *values;
};

struct model {
    const struct layer *layers;
    const float *norm;
    long depth, hidden, inner, heads, kv_heads, dim, block;
    float eps;
};

struct step {
    long rows;
    float *x; /* the residual stream */
    const float *cos, *sin;
    const int64_t *slots, *tables;
    const int64_t *starts, *contexts, (*pieces)[3]; /* of single tokens */
    long count;                                     /* of pieces */
    const int64_t (*chunks)[4]; /* (row, rows, first position, start of table) */
    long chunk_count;
    const int64_t *wanted; /* rows of which more than KV is needed, in order */
    long wanted_count;
    float *qkv, *partial; /* scratch, as are the next */
    void *attended, *inner, *packed;
    void *normed; /* also what comes out */
};
