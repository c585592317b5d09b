// Computes the gradient of flash attention with respect to queries in f32, with TF32 tensor cores (tf32.cuh): results
// as in backward_q.cuh.
//
// Mapping: one block takes BM queries of one head and loops over the visible keys, BN at a time; q and grad stay in shared memory. A
// warp, or two warps together (SIDE = 2), owns 16 MT rows.
//
// Shared memory: q and grad, BM x C each; STAGES tiles of k and of v, BN x C each; with SIDE = 2 also BM x BN weights.
//
// Limits: as in forward_tf32.cuh. Registers: dq 16 MT C, scores and their gradient 16 MT BN each, one chunk of a tile's sums
// 16 MT 32, over 32 lanes.
#pragma once
#include "attention/tf32.cuh"

namespace attention {

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_q_tf32(
    const f32* q, const f32* k, const f32* v, const f32* grad, const f32* lse, const f32* delta, f32* dq,
    const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int MT = P::MT, BM = P::BM, BN = P::BN, KEYS = P::KEYS;
    constexpr i32 TILE = BN * P::PITCH;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    grad += batch * p.grad.batch + head * p.grad.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;

    f32* const sq = shared_f32();
    f32* const sg = sq + BM * P::PITCH;
    f32* const sk = sg + BM * P::PITCH;
    f32* const sv = sk + P::STAGES * TILE;
    f32* const sw = sv + P::STAGES * TILE;
    const i32 top = first + (i32)warp_index() / P::SIDE * P::ROWS;
    const KeyRange<BM, BN, P::ROWS, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);

    load_tile_f32<P, BM>(sq, q, p.q.row, first, p.t, p.d);
    load_tile_f32<P, BM>(sg, grad, p.grad.row, first, p.t, p.e);
    if (range.begin < range.end) {
        load_tile_f32<P, BN>(sk, k, p.k.row, range.begin, p.s, p.d);
        if (P::STAGES == 2) load_tile_f32<P, BN>(sv, v, p.v.row, range.begin, p.s, p.e);
    }
    cp_async_commit();

    f32 acc[MT][P::COLUMNS / 8][4], base[MT][2], del[MT][2];
    clear(acc);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i32 r = top + read_tid() % 32 / 4 + m * 16 + h * 8;
            const i64 place = (i64)at.pair * p.t + r;
            base[m][h] = r < p.t ? B::base(lse[place]) : 0.0f;
            del[m][h] = r < p.t ? delta[place] : 0.0f;
        }
    const f32 scale2 = p.scale * LOG2E;
    i32 here = 0;
#pragma unroll 1
    for (i32 key = range.begin; key < range.end; key += BN) {
        cp_async_wait<0>();
        __syncthreads();
        if (P::STAGES == 2) {
            if (key + BN < range.end) {
                load_tile_f32<P, BN>(sk + (TILE - here), k, p.k.row, key + BN, p.s, p.d);
                load_tile_f32<P, BN>(sv + (TILE - here), v, p.v.row, key + BN, p.s, p.e);
            }
        } else {
            load_tile_f32<P, BN>(sv, v, p.v.row, key, p.s, p.e);
        }
        cp_async_commit();
        const bool active = range.sees(p, key);
        f32 x[MT][KEYS / 8][4];
        if (active) {
            scores_tf32<P>(x, sq + P::left(), sk + here + P::right());
            range.template mask<MT, KEYS>(x, p, key, top, key + P::side(read_tid()) * KEYS);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] = exp2_approx(__fmaf_rn(x[m][j][i], scale2, -base[m][i / 2]));
        }
        if (P::STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        if (active) {
            f32 y[MT][KEYS / 8][4];
            scores_tf32<P>(y, sg + P::left(), sv + here + P::right());
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] *= y[m][j][i] - del[m][i / 2];
            if constexpr (P::SIDE == 1) {
                weighted_tf32<P>(acc, RegisterWeights<P>{x}, sk + here + P::down(), NoRescale());
            } else {
                const SharedWeights<P> both{sw + P::weights()};
                both.put(x);
                pair_sync<P>();
                weighted_tf32<P>(acc, both, sk + here + P::down(), NoRescale());
            }
        } else {
            pair_sync_idle<P, 1>();
        }
        if (P::STAGES == 1) {
            __syncthreads();
            if (key + BN < range.end) load_tile_f32<P, BN>(sk, k, p.k.row, key + BN, p.s, p.d);
            cp_async_commit();
        } else {
            here = TILE - here;
        }
    }
    cp_async_wait<0>();
    const TileIndex done(p, tiles);
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM;
    dq += done.pair / p.heads * p.dq.batch + done.pair % p.heads * p.dq.head;
    store_tile_f32<P>(acc, [&](int, int) { return p.scale; }, dq, p.dq.row, start, p.t, p.d);
}

}  // namespace attention
