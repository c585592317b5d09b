// Attention in f32, backward to keys and values: what backward_kv.cuh computes, with the products of ffma.cuh.
//
// One block takes BM keys of one key head and walks over the queries that see them, BN at a time, for all r query heads
// that share the key head, in a fixed order. Keys are the rows: p^T and ds^T go through shared memory one after the other.
//
// Shared memory: k and v BM x C each, a tile of q and of grad BN x C (in one place, q brought twice, or BOTH), the weights
// BM x BN.
//
// Limits: see ffma.cuh. Registers: dk and dv BM C each, scores BM BN or the sums of a tile, over the block's threads.
#pragma once
#include "attention/ffma.cuh"

namespace attention {

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoDocuments>
__device__ __forceinline__ void backward_kv_ffma(
    const f32* q, const f32* k, const f32* v, const f32* grad, const f32* lse, const f32* delta, f32* dk, f32* dv,
    const Problem& p, const D& documents = {}) {
    constexpr int BM = P::BM, BN = P::BN, RM = P::RM, RN = P::RN, CN = P::CN;
    const Place at(p, (p.s + BM - 1) / BM);
    const i32 first = at.tile * BM;
    const i32 batch = at.pair / p.groups, group = at.pair % p.groups;
    k += batch * p.k.batch + group * p.k.head;
    v += batch * p.v.batch + group * p.v.head;
    q += batch * p.q.batch + group * p.group * p.q.head;
    grad += batch * p.grad.batch + group * p.group * p.grad.head;
    lse += (i64)at.pair * p.group * p.t;
    delta += (i64)at.pair * p.group * p.t;
    dk += batch * p.dk.batch + group * p.dk.head;
    dv += batch * p.dv.batch + group * p.dv.head;

    f32* const sk = shared_floats();
    f32* const sv = sk + BM * P::PITCH;
    f32* const sq = sv + BM * P::PITCH;
    f32* const sg = P::BOTH ? sq + BN * P::PITCH : sq;
    f32* const sw = sg + BN * P::PITCH;

    const i32 last = min(first + BM, p.s) - 1;
    const D ours = documents.of(batch, p);
    const int4 near = seen_of<BM>(ours, first, p.t);
    const i32 begin = max(CAUSAL ? first : 0, near.x) / BN * BN;
    const i32 end = min(WINDOW ? (i32)min((i64)p.t, (i64)last + p.window) : p.t, near.y);

    f32 ak[RM][CN], av[RM][CN], one[RM], by[RM];
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int c = 0; c < CN; c++) ak[i][c] = av[i][c] = 0.0f;
        one[i] = 1.0f;
        by[i] = p.scale;
    }
    const f32 scale2 = p.scale * LOG2E;
    bring_floats<P, BM>(sk, k, p.k.row, first, p.s, p.d);
    bring_floats<P, BM>(sv, v, p.v.row, first, p.s, p.e);
    copies_end();
#pragma unroll 1
    for (i32 head = 0; head < p.group; head++) {
#pragma unroll 1
        for (i32 query = begin; query < end; query += BN) {
            bring_floats<P, BN>(sq, q, p.q.row, query, p.t, p.d);
            copies_end();
            if (P::BOTH) bring_floats<P, BN>(sg, grad, p.grad.row, query, p.t, p.e);
            copies_end();
            f32 x[RM][RN], base[RN];
#pragma unroll
            for (int j = 0; j < RN; j++) {
                const i32 i = query + P::column() + j * P::TC;
                base[j] = i < p.t ? lse[i] * LOG2E : 0.0f;
            }
            copies_wait<1>();
            __syncthreads();
            scores_ffma<P>(x, sk + P::row() * P::PITCH, sq + P::column() * P::PITCH);
            if (!P::BOTH) {
                __syncthreads();
                bring_floats<P, BN>(sg, grad, p.grad.row, query, p.t, p.e);
                copies_end();
            }
#pragma unroll
            for (int i = 0; i < RM; i++)
#pragma unroll
                for (int j = 0; j < RN; j++) x[i][j] = power2(__fmaf_rn(x[i][j], scale2, -base[j]));
            // Queries behind the last have grad 0 and keys behind the last are not stored: only masks make edges.
            if ((CAUSAL && query < last) || (WINDOW && query + BN - 1 - p.window >= first)) {
#pragma unroll
                for (int i = 0; i < RM; i++)
#pragma unroll
                    for (int j = 0; j < RN; j++) {
                        const i32 r = first + P::row() + i * P::TR, c = query + P::column() + j * P::TC;
                        const bool seen = (!CAUSAL || r <= c) && (!WINDOW || r > c - p.window);
                        x[i][j] = seen ? x[i][j] : 0.0f;
                    }
            }
            if (D::ON && (query < near.z || query + BN > near.w)) hide_documents<P>(x, ours, first, query, 0.0f);
            put_weights<P>(sw, x);
            copies_wait<0>();
            __syncthreads();
            weighted_ffma<P, Piece<P, 32>::N>(av, one, sw + P::row() * P::WIDE, sg + P::column() * 4);
            scores_ffma<P>(x, sv + P::row() * P::PITCH, sg + P::column() * P::PITCH);
            __syncthreads();
            if (!P::BOTH) bring_floats<P, BN>(sq, q, p.q.row, query, p.t, p.d);
            copies_end();
            // The weights are read back, so that they take no registers under two products.
#pragma unroll
            for (int j = 0; j < RN; j++) {
                const i32 c = query + P::column() + j * P::TC;
                const f32 del = c < p.t ? delta[c] : 0.0f;
#pragma unroll
                for (int i = 0; i < RM; i++) *weight_at<P>(sw, i, j) *= x[i][j] - del;
            }
            copies_wait<0>();
            __syncthreads();
            weighted_ffma<P, Piece<P, 32>::N>(ak, one, sw + P::row() * P::WIDE, sq + P::column() * 4);
            __syncthreads();
        }
        q += p.q.head;
        grad += p.grad.head;
        lse += p.t;
        delta += p.t;
    }
    copies_wait<0>();
    store_floats<P>(ak, by, dk, p.dk.row, first, p.s, p.d);
    store_floats<P>(av, one, dv, p.dv.row, first, p.s, p.e);
}

}  // namespace attention
