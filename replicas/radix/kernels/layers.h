/* All layers of a step. Included once for each KIND. */

/* Rows that are wanted move to the front; no two threads may do it. */
static void JOINED(gather, KIND)(const struct step *s, long attended, long hidden) {
    for (long i = 0; i < s->wanted_count; i++) {
        long row = s->wanted[i];
        memmove((X *)s->attended + i * attended, (X *)s->attended + row * attended,
                attended * sizeof(X));
        memmove(s->x + i * hidden, s->x + row * hidden, hidden * sizeof(float));
    }
}

void JOINED(layers, KIND)(const struct model *m, const struct step *s) {
    long attended = m->heads * m->dim, width = m->heads + 2 * m->kv_heads;
    float scale = 1.0f / sqrtf(m->dim);
#pragma omp parallel
    {
        long rows = s->rows;
        for (const struct layer *l = m->layers; l < m->layers + m->depth; l++) {
            JOINED(norm, KIND)(s->x, l->attention_norm, m->eps, s->normed, s->rows, m->hidden);
            MULTIPLY(s->normed, s->rows, m->hidden, &l->qkv, s->qkv, width * m->dim, SET);
            JOINED(rotate_and_store, KIND)(s->qkv, l->qkv_bias, l->q_norm, l->k_norm, m->eps,
                                           s->cos, s->sin, s->slots, l->keys, l->values, s->rows,
                                           m->heads, m->kv_heads, m->dim);
            int last = l == m->layers + m->depth - 1;
            if (last && !s->wanted_count) {
                rows = 0;
                break;
            }
            if (s->count)
                JOINED(attend, KIND)(s->qkv, width, l->keys, l->values, s->tables, s->starts,
                                     s->contexts, s->pieces, s->count, s->attended, s->partial,
                                     m->heads, m->kv_heads, m->dim, m->block, scale);
            for (long i = 0; i < s->chunk_count; i++) {
                const int64_t *c = s->chunks[i];
                JOINED(attend_chunk, KIND)(s->qkv + c[0] * width * m->dim, width, l->keys,
                                           l->values, s->tables + c[3], s->packed,
                                           (X *)s->attended + c[0] * attended, c[1], c[2],
                                           m->heads, m->kv_heads, m->dim, m->block, scale);
            }
            if (last && s->wanted_count < rows) {
                rows = s->wanted_count;
#pragma omp single
                JOINED(gather, KIND)(s, attended, m->hidden);
            }
            MULTIPLY(s->attended, rows, attended, &l->attention_out, s->x, m->hidden, ADD);
            JOINED(norm, KIND)(s->x, l->mlp_norm, m->eps, s->normed, rows, m->hidden);
            MULTIPLY(s->normed, rows, m->hidden, &l->gate_up, s->inner, 2 * m->inner, GATED);
            MULTIPLY(s->inner, rows, m->inner, &l->down, s->x, m->hidden, ADD);
        }
        JOINED(norm, KIND)(s->x, m->norm, m->eps, s->normed, rows, m->hidden);
    }
}
