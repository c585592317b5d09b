// Computes the gradients of flash attention with respect to keys and values in f32, with TF32 tensor cores (tf32.cuh):
// results as in backward_kv.cuh.
//
// Mapping: one block takes BM keys of one key head and loops over the queries that attend to them, BN at a time, for
// all r query heads that share the key head, in a fixed order. Keys are the rows: the accumulators of p^T and ds^T are
// the left operands of the next two products. A warp, or two warps together (SIDE = 2), owns 16 MT rows.
//
// Shared memory: k and v, BM x C each; STAGES tiles of q and of grad, BN x C each, with BN values of lse and of delta;
// with SIDE = 2 also BM x BN weights, p^T and ds^T in turn.
//
// Limits: as in forward_tf32.cuh. Registers: dk and dv 16 MT C / SIDE each, scores and their gradient 16 MT BN / SIDE each, one chunk
// of a tile's sums 16 MT 32, over 32 lanes.
#pragma once
#include "attention/tf32.cuh"

namespace attention {

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_kv_tf32(
    const f32* q, const f32* k, const f32* v, const f32* grad, const f32* lse, const f32* delta, f32* dk, f32* dv,
    const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int MT = P::MT, BM = P::BM, BN = P::BN, N = P::COLUMNS, KEYS = P::KEYS;
    // Weights are positive, so of all sums here those of dv lose most to the truncation of tensor cores. In chains of
    // 64 queries their error was up to three times that of plain sums. (Chains of 16 would need more registers than
    // there are.)
    constexpr int CHAIN = P::PRODUCTS == 3 && BN > 32 ? 32 : BN;
    // One stage: a tile of q, of grad, of lse and of delta.
    constexpr i32 TILE = BN * P::PITCH, STAGE = 2 * TILE + 2 * BN;
    static_assert(2 * BN <= P::THREADS);
    const TileIndex at(p, (p.s + BM - 1) / BM);
    const i32 first = at.tile * BM;
    const i32 batch = at.pair / p.groups, group = at.pair % p.groups;
    k += batch * p.k.batch + group * p.k.head;
    v += batch * p.v.batch + group * p.v.head;
    q += batch * p.q.batch + group * p.group * p.q.head;
    grad += batch * p.grad.batch + group * p.group * p.grad.head;
    // The first BN threads copy lse, the next BN copy delta.
    const f32* stats_from = (threadIdx.x < BN ? lse : delta) + (i64)at.pair * p.group * p.t;

    f32* const sk = shared_f32();
    f32* const sv = sk + BM * P::PITCH;
    f32* const sq = sv + BM * P::PITCH;
    f32* const sw = sq + P::STAGES * STAGE;
    const i32 top = first + (i32)warp_index() / P::SIDE * P::ROWS;
    const QueryRange<BM, BN, P::ROWS, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);
    // For all heads that share these keys.
    const i32 steps = range.steps() * p.group;

    f32 ak[MT][N / 8][4], av[MT][N / 8][4];
    clear(ak);
    clear(av);

    // Copies the tile of queries at `ahead`; `q`, `grad` and `stats_from` point to its head.
    auto fetch = [&](f32* to, i32 ahead) {
        load_tile_f32<P, BN>(to, q, p.q.row, ahead, p.t, p.d);
        load_tile_f32<P, BN>(to + TILE, grad, p.grad.row, ahead, p.t, p.e);
        const i32 tid = read_tid();
        if (tid < 2 * BN) {
            const i32 i = ahead + tid % BN;
            const bool on = i < p.t;
            cp_async_4(shared_address(to + 2 * TILE + tid), stats_from + (on ? i : 0), on);
        }
        if (ahead + BN >= range.end) {
            q += p.q.head;
            grad += p.grad.head;
            stats_from += p.t;
        }
    };

    load_tile_f32<P, BM>(sk, k, p.k.row, first, p.s, p.d);
    load_tile_f32<P, BM>(sv, v, p.v.row, first, p.s, p.e);
    if (P::STAGES == 2 && steps > 0) fetch(sq, range.begin);
    cp_async_commit();
    const f32 scale2 = p.scale * LOG2E;
    i32 here = 0, query = range.begin;
#pragma unroll 1
    for (i32 left = steps; left > 0; left--) {
        if (P::STAGES == 1) {
            __syncthreads();
            fetch(sq, query);
            cp_async_commit();
        }
        cp_async_wait<0>();
        __syncthreads();
        if (P::STAGES == 2) {
            if (left > 1) fetch(sq + (STAGE - here), query + BN < range.end ? query + BN : range.begin);
            cp_async_commit();
        }
        const f32* const tq = sq + here;
        const f32* const tg = tq + TILE;
        const f32* const stats = tg + TILE + P::side(read_tid()) * KEYS + read_tid() % 4 * 2;
        if (range.sees(p, query)) {
            f32 x[MT][KEYS / 8][4];
            scores_tf32<P>(x, sk + P::left(), tq + P::right());
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                float2 base = *(const float2*)(stats + j * 8);
                base.x = B::base(base.x);
                base.y = B::base(base.y);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        x[m][j][i] = exp2_approx(__fmaf_rn(x[m][j][i], scale2, -((i & 1) ? base.y : base.x)));
            }
            range.template mask<MT, KEYS>(x, p, query, top, query + P::side(read_tid()) * KEYS);
            if constexpr (P::SIDE == 1) {
                weighted_tf32<P, CHAIN>(av, RegisterWeights<P>{x}, tg + P::down(), NoRescale());
            } else {
                const SharedWeights<P> both{sw + P::weights()};
                both.put(x);
                pair_sync<P>();
                weighted_tf32<P, CHAIN>(av, both, tg + P::down(), NoRescale());
            }
            f32 y[MT][KEYS / 8][4];
            scores_tf32<P>(y, sv + P::left(), tg + P::right());
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                const float2 del = *(const float2*)(stats + BN + j * 8);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] *= y[m][j][i] - ((i & 1) ? del.y : del.x);
            }
            if constexpr (P::SIDE == 1) {
                weighted_tf32<P>(ak, RegisterWeights<P>{x}, tq + P::down(), NoRescale());
            } else {
                const SharedWeights<P> both{sw + P::weights()};
                pair_sync<P>();
                both.put(x);
                pair_sync<P>();
                weighted_tf32<P>(ak, both, tq + P::down(), NoRescale());
            }
        } else {
            pair_sync_idle<P, 3>();
        }
        query += BN;
        if (query >= range.end) query = range.begin;
        if (P::STAGES == 2) here = STAGE - here;
    }
    cp_async_wait<0>();
    const TileIndex done(p, (p.s + BM - 1) / BM);
    dk += done.pair / p.groups * p.dk.batch + done.pair % p.groups * p.dk.head;
    dv += done.pair / p.groups * p.dv.batch + done.pair % p.groups * p.dv.head;
    const i32 start = done.tile * BM;
    store_tile_f32<P>(ak, [&](int, int) { return p.scale; }, dk, p.dk.row, start, p.s, p.d);
    store_tile_f32<P>(av, NoRescale(), dv, p.dv.row, start, p.s, p.e);
}

}  // namespace attention
