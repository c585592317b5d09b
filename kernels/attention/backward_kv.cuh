// Computes the gradients of flash attention with respect to keys and values, with mma.sync (sm_80 and later): q, k, v,
// grad, lse, delta -> dk (B, G, S, D), dv (B, G, S, E).
//
//   p^T = exp(scale k q^T - lse), dv = p^T grad, ds^T = p^T (v grad^T - delta), dk = scale ds^T q
//
// Dao et al. (arXiv:2205.14135, algorithm 4); Dao, FlashAttention-2 (arXiv:2307.08691). Shapes and delta as in backward_q.cuh.
//
// Mapping: one block takes BM = 16 MT WARPS keys of one key head and loops over the queries that attend to them, BN at
// a time, for all r query heads that share the key head. No two blocks add to the same element, and the order of
// additions is fixed. Everything is computed transposed, with keys as rows: the accumulators of p^T and ds^T are the
// left operands of the next two products and never go through shared memory.
//
// SPLIT > 1: a block computes only C / SPLIT columns of dk and dv, selected by blockIdx.y; scores are computed SPLIT
// times. This is for D = 256, whose accumulators do not fit in one warp. IN_REGISTERS: the fragments of k stay in
// registers; at D = 128 those of v do not fit as well.
//
// Shared memory: k and v, BM x C each; STAGES tiles of q and of grad, BN x C each, with BN values of lse and of delta.
//
// Limits: shared memory bandwidth (with MT = 1, every fragment feeds one product), then mma.sync issue. Registers: dk
// and dv 16 MT C / SPLIT each, scores and their gradient 16 MT BN each, over 32 lanes.
#pragma once
#include "attention/mask_range.cuh"

namespace attention {

template <int C_, int WARPS_, int MT_, int BN_, int STAGES_, bool IN_REGISTERS_, int SPLIT_>
struct BackwardKVPlan {
    static constexpr int C = C_, WARPS = WARPS_, MT = MT_, BN = BN_, STAGES = STAGES_, SPLIT = SPLIT_;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    static constexpr int BM = 16 * MT * WARPS;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int COLUMNS = C / SPLIT;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_kv(
    const T* q, const T* k, const T* v, const T* grad, const f32* lse, const f32* delta,
    typename B::template Result<T>* dk, typename B::template Result<T>* dv, const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, MT = P::MT, BM = P::BM, BN = P::BN, THREADS = P::THREADS, N = P::COLUMNS;
    using Keys = Tile<C, BM>;
    using Queries = Tile<C, BN>;
    // One stage: a tile of q, of grad, of lse and of delta.
    constexpr u32 STAGE = 2 * Queries::BYTES + 1024;
    static_assert(BN * 8 <= 1024 && BN * 2 <= THREADS);
    const TileIndex at(p, (p.s + BM - 1) / BM);
    const i32 first = at.tile * BM;
    const i32 batch = at.pair / p.groups, group = at.pair % p.groups;
    k += batch * p.k.batch + group * p.k.head;
    v += batch * p.v.batch + group * p.v.head;
    q += batch * p.q.batch + group * p.group * p.q.head;
    grad += batch * p.grad.batch + group * p.group * p.grad.head;
    // The first BN threads copy lse, the next BN copy delta.
    const f32* stats_from = (threadIdx.x < BN ? lse : delta) + (i64)at.pair * p.group * p.t;

    const u32 lane = threadIdx.x & 31, warp = warp_index();
    const u32 sk = shared_address(shared_memory), sv = sk + Keys::BYTES, sq = sv + Keys::BYTES;
    const i32 top = first + (i32)warp * MT * 16;
    const QueryRange<BM, BN, MT * 16, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);
    // For all heads that share these keys.
    const i32 steps = range.steps() * p.group;
    const int column = P::SPLIT == 1 ? 0 : (int)blockIdx.y * N;

    typename LeftOperand<P::IN_REGISTERS, Keys, MT>::Type lk(sk, warp * MT * 16, lane);
    const SharedOperand<Keys, MT> lv(sv, warp * MT * 16, lane);
    const u32 along = Queries::lane_along(lane), down = Queries::lane_down(lane);

    f32 ak[MT][N / 8][4], av[MT][N / 8][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) ak[m][j][i] = av[m][j][i] = 0.0f;

    // Copies the tile of queries at `ahead`; `q`, `grad` and `stats_from` point to its head.
    auto fetch = [&](u32 to, i32 ahead) {
        Queries::template load<THREADS>(to, q, p.q.row, ahead, p.t, p.d);
        Queries::template load<THREADS>(to + Queries::BYTES, grad, p.grad.row, ahead, p.t, p.e);
        const i32 tid = read_tid();
        if (tid < 2 * BN) {
            i32 i = ahead + tid % BN;
            bool on = i < p.t;
            cp_async_4(to + 2 * Queries::BYTES + tid * 4, stats_from + (on ? i : 0), on);
        }
        if (ahead + BN >= range.end) {
            q += p.q.head;
            grad += p.grad.head;
            stats_from += p.t;
        }
    };

    Keys::template load<THREADS>(sk, k, p.k.row, first, p.s, p.d);
    Keys::template load<THREADS>(sv, v, p.v.row, first, p.s, p.e);
    cp_async_commit();
    if (P::STAGES == 2 && steps > 0) fetch(sq, range.begin);
    cp_async_commit();
    if (P::IN_REGISTERS) {
        cp_async_wait<1>();
        __syncthreads();
        lk.fetch();
    }
    const f32 scale2 = p.scale * LOG2E;
    u32 stage = 0;
    i32 query = range.begin;
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
            if (left > 1) fetch(sq + (stage ^ 1) * STAGE, query + BN < range.end ? query + BN : range.begin);
            cp_async_commit();
        }
        const u32 tq = sq + stage * STAGE, tg = tq + Queries::BYTES, stats = tg + Queries::BYTES + (lane & 3) * 8;
        if (range.sees(p, query)) {
            f32 x[MT][BN / 8][4];
            scores<T, Queries, MT, BN>(x, lk, tq + along);
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                float2 base = load_shared2(stats + j * 32);
                base.x = B::base(base.x);
                base.y = B::base(base.y);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        x[m][j][i] = exp2_approx(x[m][j][i] * scale2 - ((i & 1) ? base.y : base.x));
            }
            range.template mask<MT, BN>(x, p, query, top, query);
            u32 w[MT][BN / 16][4];
            pack<T, MT, BN>(w, x);
            weighted<T, Queries, MT, BN, N>(av, w, P::SPLIT == 1 ? tg + down : Queries::shift(tg + down, column), 0);
            f32 y[MT][BN / 8][4];
            scores<T, Queries, MT, BN>(y, lv, tg + along);
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                float2 del = load_shared2(stats + BN * 4 + j * 32);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] *= y[m][j][i] - ((i & 1) ? del.y : del.x);
            }
            pack<T, MT, BN>(w, x);
            weighted<T, Queries, MT, BN, N>(ak, w, P::SPLIT == 1 ? tq + down : Queries::shift(tq + down, column), 0);
        }
        query += BN;
        if (query >= range.end) query = range.begin;
        if (P::STAGES == 2) stage ^= 1;
    }
    cp_async_wait<0>();
    if (steps == 0) __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) ak[m][j][i] *= p.scale;
    const TileIndex done(p, (p.s + BM - 1) / BM);
    dk += done.pair / p.groups * p.dk.batch + done.pair % p.groups * p.dk.head;
    dv += done.pair / p.groups * p.dv.batch + done.pair % p.groups * p.dv.head;
    __syncwarp();
    const i32 start = done.tile * BM, mine = read_tid() / 32 * MT * 16;
    store_result<B, Keys, T, MT, N>(ak, sk, dk, p.dk.row, start, p.s, p.d, mine, column);
    store_result<B, Keys, T, MT, N>(av, sv, dv, p.dv.row, start, p.s, p.e, mine, column);
}

}  // namespace attention
