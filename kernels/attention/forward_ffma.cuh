// Attention in f32, forward: what forward.cuh computes, with the products of ffma.cuh.
//
// One block takes BM queries of one head and walks over the keys that they see, BN at a time. The weights of a tile go
// through shared memory, from the threads that made them to all that need their rows.
//
// Shared memory: q BM x C, a tile of k and of v BN x C (one after the other in the same place, or each its own: BOTH), the
// weights BM x BN.
//
// Limits: see ffma.cuh. Registers: out BM C, and scores BM BN or the sums of a tile BM C, over the block's threads.
#pragma once
#include "attention/ffma.cuh"

namespace attention {

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoDocuments>
__device__ __forceinline__ void forward_ffma(
    const f32* q, const f32* k, const f32* v, f32* out, f32* lse, const Problem& p, const D& documents = {}) {
    constexpr int BM = P::BM, BN = P::BN, RM = P::RM, RN = P::RN;
    const i32 tiles = (p.t + BM - 1) / BM;
    const Place at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;
    out += batch * p.out.batch + head * p.out.head;

    f32* const sq = shared_floats();
    f32* const sk = sq + BM * P::PITCH;
    f32* const sv = P::BOTH ? sk + BN * P::PITCH : sk;
    f32* const sw = sv + BN * P::PITCH;

    const i32 last = min(first + BM, p.t) - 1;
    const D ours = documents.of(batch, p);
    const int4 near = seen_of<BM>(ours, first, p.t);
    const i32 end = min(CAUSAL ? min(p.s, last + 1) : p.s, near.y);
    const i32 begin = max(WINDOW ? max(first - p.window + 1, 0) : 0, near.x) / BN * BN;

    f32 o[RM][P::CN], base[RM], sum[RM];
#pragma unroll
    for (int i = 0; i < RM; i++) {
#pragma unroll
        for (int c = 0; c < P::CN; c++) o[i][c] = 0.0f;
        base[i] = -infinity();
        sum[i] = 0.0f;
    }
    // Bases are rounded to log2 once, so that equal ones fade by exactly 1.
    const f32 scale2 = p.scale * LOG2E;
    bring_floats<P, BM>(sq, q, p.q.row, first, p.t, p.d);
    if (begin < end) bring_floats<P, BN>(sk, k, p.k.row, begin, p.s, p.d);
    copies_end();
#pragma unroll 1
    for (i32 key = begin; key < end; key += BN) {
        copies_wait<0>();
        __syncthreads();
        if (P::BOTH) bring_floats<P, BN>(sv, v, p.v.row, key, p.s, p.e);
        copies_end();
        f32 x[RM][RN], fade[RM];
        scores_ffma<P>(x, sq + P::row() * P::PITCH, sk + P::column() * P::PITCH);
        if (!P::BOTH) {
            __syncthreads();
            bring_floats<P, BN>(sv, v, p.v.row, key, p.s, p.e);
            copies_end();
        }
        if (key + BN > p.s || (CAUSAL && key + BN - 1 > first) || (WINDOW && key <= last - p.window))
            hide_scores<P, CAUSAL, WINDOW>(x, first, key, p.s, p.window);
        if (D::ON && (key < near.z || key + BN > near.w)) hide_documents<P>(x, ours, first, key, -infinity());
#pragma unroll
        for (int i = 0; i < RM; i++) {
            f32 high = x[i][0];
#pragma unroll
            for (int j = 1; j < RN; j++) high = fmaxf(high, x[i][j]);
#pragma unroll
            for (int n = 1; n < P::TC; n *= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, n));
            // A row that has seen no key yet keeps its -inf; its weights are 2^-inf.
            const f32 next = fmaxf(base[i], high * scale2), by = next == -infinity() ? 0.0f : next;
            fade[i] = power2(base[i] - by);
            base[i] = next;
            f32 add = 0.0f;
#pragma unroll
            for (int j = 0; j < RN; j++) {
                x[i][j] = power2(__fmaf_rn(x[i][j], scale2, -by));
                add += x[i][j];
            }
            sum[i] = __fmaf_rn(sum[i], fade[i], add);
        }
        put_weights<P>(sw, x);
        copies_wait<0>();
        __syncthreads();
        if (P::BOTH && key + BN < end) bring_floats<P, BN>(sk, k, p.k.row, key + BN, p.s, p.d);
        weighted_ffma<P, Piece<P, 64>::N>(o, fade, sw + P::row() * P::WIDE, sv + P::column() * 4);
        if (!P::BOTH) {
            __syncthreads();
            if (key + BN < end) bring_floats<P, BN>(sk, k, p.k.row, key + BN, p.s, p.d);
        }
        copies_end();
    }
    copies_wait<0>();

#pragma unroll
    for (int i = 0; i < RM; i++) {
        f32 total = sum[i];
#pragma unroll
        for (int n = 1; n < P::TC; n *= 2) total += __shfl_xor_sync(0xffffffffu, total, n);
        sum[i] = total > 0.0f ? 1.0f / total : 0.0f;
        const i32 row = first + P::row() + i * P::TR;
        if (lse && P::column() == 0 && row < p.t)
            lse[(i64)at.pair * p.t + row] = total > 0.0f ? __fmaf_rn(base[i], LN2, logf(total)) : 0.0f;
    }
    store_floats<P>(o, sum, out, p.out.row, first, p.t, p.e);
}

}  // namespace attention
