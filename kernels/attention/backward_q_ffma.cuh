// Attention in f32, backward to the queries: what backward_q.cuh computes, with the products of ffma.cuh.
//
// One block takes BM queries of one head and walks over the keys that they see, BN at a time. grad v^T comes first and
// waits in registers: then one place can hold v, then k, which is read twice.
//
// Shared memory: q and grad BM x C each, a tile of k and of v BN x C (in one place, or BOTH), the weights BM x BN.
//
// Limits: see ffma.cuh. Registers: dq BM C, scores and their gradient BM BN each or the sums of a tile BM C, over the
// block's threads.
#pragma once
#include "attention/ffma.cuh"

namespace attention {

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoDocuments>
__device__ __forceinline__ void backward_q_ffma(
    const f32* q, const f32* k, const f32* v, const f32* grad, const f32* lse, const f32* delta, f32* dq,
    const Problem& p, const D& documents = {}) {
    constexpr int BM = P::BM, BN = P::BN, RM = P::RM, RN = P::RN;
    const i32 tiles = (p.t + BM - 1) / BM;
    const Place at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    grad += batch * p.grad.batch + head * p.grad.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;
    dq += batch * p.dq.batch + head * p.dq.head;

    f32* const sq = shared_floats();
    f32* const sg = sq + BM * P::PITCH;
    f32* const sk = sg + BM * P::PITCH;
    f32* const sv = P::BOTH ? sk + BN * P::PITCH : sk;
    f32* const sw = sv + BN * P::PITCH;

    const i32 last = min(first + BM, p.t) - 1;
    const D ours = documents.of(batch, p);
    const int4 near = seen_of<BM>(ours, first, p.t);
    const i32 end = min(CAUSAL ? min(p.s, last + 1) : p.s, near.y);
    const i32 begin = max(WINDOW ? max(first - p.window + 1, 0) : 0, near.x) / BN * BN;

    f32 acc[RM][P::CN], base[RM], del[RM], one[RM], by[RM];
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int c = 0; c < P::CN; c++) acc[i][c] = 0.0f;
        const i32 row = first + P::row() + i * P::TR;
        const i64 place = (i64)at.pair * p.t + row;
        base[i] = row < p.t ? lse[place] * LOG2E : 0.0f;
        del[i] = row < p.t ? delta[place] : 0.0f;
        one[i] = 1.0f;
        by[i] = p.scale;
    }
    const f32 scale2 = p.scale * LOG2E;
    bring_floats<P, BM>(sq, q, p.q.row, first, p.t, p.d);
    bring_floats<P, BM>(sg, grad, p.grad.row, first, p.t, p.e);
    if (begin < end) bring_floats<P, BN>(sv, v, p.v.row, begin, p.s, p.e);
    copies_end();
#pragma unroll 1
    for (i32 key = begin; key < end; key += BN) {
        copies_wait<0>();
        __syncthreads();
        if (P::BOTH) bring_floats<P, BN>(sk, k, p.k.row, key, p.s, p.d);
        f32 x[RM][RN], y[RM][RN];
        scores_ffma<P>(y, sg + P::row() * P::PITCH, sv + P::column() * P::PITCH);
        if (!P::BOTH) {
            __syncthreads();
            bring_floats<P, BN>(sk, k, p.k.row, key, p.s, p.d);
        }
        copies_end();
        copies_wait<0>();
        __syncthreads();
        if (P::BOTH && key + BN < end) bring_floats<P, BN>(sv, v, p.v.row, key + BN, p.s, p.e);
        scores_ffma<P>(x, sq + P::row() * P::PITCH, sk + P::column() * P::PITCH);
        if (key + BN > p.s || (CAUSAL && key + BN - 1 > first) || (WINDOW && key <= last - p.window))
            hide_scores<P, CAUSAL, WINDOW>(x, first, key, p.s, p.window);
        if (D::ON && (key < near.z || key + BN > near.w)) hide_documents<P>(x, ours, first, key, -infinity());
#pragma unroll
        for (int i = 0; i < RM; i++)
#pragma unroll
            for (int j = 0; j < RN; j++)
                x[i][j] = power2(__fmaf_rn(x[i][j], scale2, -base[i])) * (y[i][j] - del[i]);
        put_weights<P>(sw, x);
        __syncthreads();
        weighted_ffma<P, Piece<P, 64>::N>(acc, one, sw + P::row() * P::WIDE, sk + P::column() * 4);
        if (!P::BOTH) {
            __syncthreads();
            if (key + BN < end) bring_floats<P, BN>(sv, v, p.v.row, key + BN, p.s, p.e);
        }
        copies_end();
    }
    copies_wait<0>();
    store_floats<P>(acc, by, dq, p.dq.row, first, p.t, p.d);
}

}  // namespace attention
