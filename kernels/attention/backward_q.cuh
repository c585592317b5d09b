// Computes the gradient of flash attention with respect to queries, with mma.sync (sm_80 and later): q, k, v, grad (B,
// H, T, E), lse and delta (B, H, T) -> dq (B, H, T, D).
//
//   p = exp(scale q k^T - lse), ds = p (grad v^T - delta), dq = scale ds k, with delta = the sum of grad out along E.
//
// Dao et al. (arXiv:2205.14135, algorithm 4); Dao, FlashAttention-2 (arXiv:2307.08691). They accumulate dq with atomics
// in the kernel for dk and dv. Here dq has a separate kernel and the same bits in every run. It costs two more products
// (seven in the whole backward pass), but needs no atomics and no tile of weights in shared memory.
//
// Mapping: one block takes BM = 16 MT WARPS queries of one head and loops over the visible keys, BN at a time, as the forward pass
// does; q and grad stay in shared memory.
//
// Shared memory: q and grad, BM x C each; STAGES tiles of k and of v, BN x C each.
//
// Limits: shared memory bandwidth and mma.sync issue (k is read twice, v once), and registers: dq 16 MT C, scores and their gradient
// 16 MT BN each, over 32 lanes.
#pragma once
#include "attention/mask_range.cuh"

namespace attention {

template <int C_, int WARPS_, int MT_, int BN_, int STAGES_, bool IN_REGISTERS_>
struct BackwardQPlan {
    static constexpr int C = C_, WARPS = WARPS_, MT = MT_, BN = BN_, STAGES = STAGES_;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    static constexpr int BM = 16 * MT * WARPS;
    static constexpr int THREADS = 32 * WARPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_q(
    const T* q, const T* k, const T* v, const T* grad, const f32* lse, const f32* delta, typename B::template Result<T>* dq, const Problem& p,
    const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, MT = P::MT, BM = P::BM, BN = P::BN, THREADS = P::THREADS;
    using Queries = Tile<C, BM>;
    using Keys = Tile<C, BN>;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    grad += batch * p.grad.batch + head * p.grad.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;

    const u32 lane = threadIdx.x & 31, warp = warp_index();
    const u32 sq = shared_address(shared_memory), sg = sq + Queries::BYTES;
    const u32 sk = sg + Queries::BYTES, sv = sk + P::STAGES * Keys::BYTES;
    const i32 top = first + (i32)warp * MT * 16;
    const KeyRange<BM, BN, MT * 16, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);

    typename LeftOperand<P::IN_REGISTERS, Queries, MT>::Type lq(sq, warp * MT * 16, lane), lg(sg, warp * MT * 16, lane);
    const u32 along = Keys::lane_along(lane), down = Keys::lane_down(lane);

    Queries::template load<THREADS>(sq, q, p.q.row, first, p.t, p.d);
    Queries::template load<THREADS>(sg, grad, p.grad.row, first, p.t, p.e);
    cp_async_commit();
    if (range.begin < range.end) {
        Keys::template load<THREADS>(sk, k, p.k.row, range.begin, p.s, p.d);
        if (P::STAGES == 2) Keys::template load<THREADS>(sv, v, p.v.row, range.begin, p.s, p.e);
    }
    cp_async_commit();

    f32 acc[MT][C / 8][4], base[MT][2], del[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int j = 0; j < C / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][j][i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            i32 r = top + (i32)lane / 4 + m * 16 + h * 8;
            i64 place = (i64)at.pair * p.t + r;
            base[m][h] = r < p.t ? B::base(lse[place]) : 0.0f;
            del[m][h] = r < p.t ? delta[place] : 0.0f;
        }
    }
    if (P::IN_REGISTERS) {
        cp_async_wait<1>();
        __syncthreads();
        lq.fetch();
        lg.fetch();
    }
    const f32 scale2 = p.scale * LOG2E;
    u32 stage = 0;
#pragma unroll 1
    for (i32 key = range.begin; key < range.end; key += BN) {
        cp_async_wait<0>();
        __syncthreads();
        if (P::STAGES == 2) {
            u32 next = (stage ^ 1) * Keys::BYTES;
            if (key + BN < range.end) {
                Keys::template load<THREADS>(sk + next, k, p.k.row, key + BN, p.s, p.d);
                Keys::template load<THREADS>(sv + next, v, p.v.row, key + BN, p.s, p.e);
            }
        } else {
            Keys::template load<THREADS>(sv, v, p.v.row, key, p.s, p.e);
        }
        cp_async_commit();
        const u32 here = P::STAGES == 2 ? stage * Keys::BYTES : 0;
        const bool active = range.sees(p, key);
        f32 x[MT][BN / 8][4];
        if (active) {
            scores<T, Keys, MT, BN>(x, lq, sk + along + here);
            range.template mask<MT, BN>(x, p, key, top, key);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] = exp2_approx(x[m][j][i] * scale2 - base[m][i / 2]);
        }
        if (P::STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
        }
        if (active) {
            f32 y[MT][BN / 8][4];
            scores<T, Keys, MT, BN>(y, lg, sv + along + here);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] *= y[m][j][i] - del[m][i / 2];
            u32 w[MT][BN / 16][4];
            pack<T, MT, BN>(w, x);
            weighted<T, Keys, MT, BN, C>(acc, w, sk + down + here, 0);
        }
        if (P::STAGES == 1) {
            __syncthreads();
            if (key + BN < range.end) Keys::template load<THREADS>(sk, k, p.k.row, key + BN, p.s, p.d);
            cp_async_commit();
        }
        stage ^= 1;
    }
    cp_async_wait<0>();
    if (range.begin >= range.end) __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < C / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][j][i] *= p.scale;
    const TileIndex done(p, tiles);
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM;
    dq += done.pair / p.heads * p.dq.batch + done.pair % p.heads * p.dq.head;
    __syncwarp();
    store_result<B, Queries, T, MT, C>(acc, sq, dq, p.dq.row, start, p.t, p.d, read_tid() / 32 * MT * 16, 0);
}

}  // namespace attention
