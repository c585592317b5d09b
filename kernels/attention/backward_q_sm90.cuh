// Computes the gradient of flash attention with respect to queries, with wgmma and TMA (sm_90a): results as in
// backward_q.cuh, pipeline as in forward_sm90.cuh.
//
// `stats` (B, H, padded, 2) receives (lse log2(e), delta) of each row, and 0 after the last one, for
// backward_kv_sm90.cuh, which runs next. A block computes the stats of its rows while TMA loads q and grad; `out` and
// `grads` are the forward result and its gradient in global memory. With a block of keys, delta is an operand.
//
// The scores and grad v^T of a tile are issued before dq += ds k of the previous tile completes. With LEAN they are
// issued after it. This saves BN / 4 registers, and the other warpgroups keep the tensor cores busy.
//
// Shared memory: q and grad, BM x C each; STAGES tiles of k and of v, BN x C each; mbarriers.
//
// Limits: shared memory (scores and grad v^T read both operands from it: 128 bytes per clock at BN = 64), then the
// tensor cores. Registers: dq C / 2, scores and their gradient BN / 2 each.
#pragma once
#include "attention/mask_range.cuh"
#include "attention/preprocess.cuh"
#include "device/warpgroup.cuh"

namespace attention {

template <int C_, int GROUPS_, int BN_, int STAGES_, bool LEAN_>
struct BackwardQSm90Plan {
    static constexpr int C = C_, GROUPS = GROUPS_, BN = BN_, STAGES = STAGES_;
    static constexpr bool LEAN = LEAN_;
    static constexpr int BM = 64 * GROUPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_q_sm90(
    const TensorMap& q, const TensorMap& k, const TensorMap& v, const TensorMap& grad, const T* grads, const T* out,
    const f32* lse, float2* stats, typename B::template Result<T>* dq, const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, BM = P::BM, BN = P::BN, STAGES = P::STAGES, GROUPS = P::GROUPS;
    using Queries = Tile<C, BM>;
    using Keys = Tile<C, BN>;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads, key_head = head / p.group;

    const u32 lane = threadIdx.x & 31, warp = warp_index(), group = warp / 4;
    const u32 sq = shared_address(shared_memory), sg = sq + Queries::BYTES;
    const u32 sk = sg + Queries::BYTES, sv = sk + STAGES * Keys::BYTES;
    // Barriers: q and grad loaded; k and v loaded; k and v consumed.
    const u32 rows_here = sv + STAGES * Keys::BYTES;
    const Pipeline<STAGES, GROUPS> pipe(rows_here + 8);
    const bool leader = group == GROUPS - 1 && warp % 4 == 0 && lane == 0;

    const i32 top = first + (i32)group * 64;
    const KeyRange<BM, BN, 64, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);
    // Tiles of the block, and the first and last of those that contain keys visible to this warpgroup.
    const i32 all = range.steps(), hi = top < p.t ? range.steps_to_last() : 0, lo = range.steps_to_first(p, hi);

    auto fetch = [&](i32 n, u32 stage) {
        const u32 barrier = pipe.barrier(stage);
        mbarrier_expect_tx(barrier, 2 * Keys::BYTES);
        tma_load<C, BN>(sk + stage * Keys::BYTES, k, range.begin + n * BN, key_head, batch, barrier);
        tma_load<C, BN>(sv + stage * Keys::BYTES, v, range.begin + n * BN, key_head, batch, barrier);
    };
    if (leader) {
        mbarrier_init(rows_here, 1);
        pipe.make();
        fence_mbarrier_init();
        mbarrier_expect_tx(rows_here, 2 * Queries::BYTES);
        tma_load<C, BM>(sq, q, first, head, batch, rows_here);
        tma_load<C, BM>(sg, grad, first, head, batch, rows_here);
        for (i32 n = 0; n < min(all, STAGES); n++) fetch(n, n);
    }
    __syncthreads();

    PipelineState<STAGES> now;
    i32 step = 0;
    auto feed = [&] {
        refill(leader, step, all, now, fetch, pipe);
        step++;
    };
    auto pass = [&] {
        feed();
        skip_tile(lane, now, pipe);
    };

    f32 acc[1][C / 8][4], base[2], del[2];
    u32 w[1][BN / 16][4];
#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[0][j][i] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        i32 r = top + (i32)(warp % 4) * 16 + (i32)lane / 4 + h * 8;
        float2 n;
        if constexpr (B::BLOCK) {
            const i64 place = (i64)at.pair * p.t + r;
            n = r < p.t ? make_float2(B::base(lse[place]), keys.rows[place]) : make_float2(0.0f, 0.0f);
        } else {
            n = row_stats<T, C>(grads, out, lse, at.pair, r, p);
        }
        if (r < p.t && lane % 4 == 0) stats[(i64)at.pair * p.padded + r] = n;
        base[h] = n.x;
        del[h] = n.y;
    }
    if (first + BM >= p.t)
        for (i32 r = p.t + (i32)threadIdx.x; r < p.padded; r += blockDim.x)
            stats[(i64)at.pair * p.padded + r] = make_float2(0.0f, 0.0f);
    const f32 scale2 = p.scale * LOG2E;
    const u32 my_q = sq + group * 64 * 128, my_g = sg + group * 64 * 128;

    mbarrier_wait(rows_here, 0);
    for (i32 n = 0; n < lo; n++) pass();
#pragma unroll 1
    for (i32 n = lo; n < hi; n++) {
        feed();
        const u32 tk = sk + now.stage * Keys::BYTES, tv = sv + now.stage * Keys::BYTES;
        f32 x[1][BN / 8][4], y[1][BN / 8][4];
        pipe.wait(now);
        wgmma_fence();
        wgmma_k_major<T, C, BM, BN>(x[0], my_q, tk);
        wgmma_commit();
        wgmma_k_major<T, C, BM, BN>(y[0], my_g, tv);
        wgmma_commit();
        // Wait for the scores, and with them the products of dq of the previous tile.
        wgmma_wait<1>();
        fence_registers(x[0]);
        fence_registers(acc[0]);
        if (!P::LEAN && n > lo && lane == 0) pipe.release(now.template before<1>());
        const i32 key = range.begin + n * BN;
        range.template mask<1, BN>(x, p, key, top + (i32)(warp % 4) * 16, key);
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[0][j][i] = exp2_approx(x[0][j][i] * scale2 - base[i / 2]);
        wgmma_wait<0>();
        fence_registers(y[0]);
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[0][j][i] *= y[0][j][i] - del[i / 2];
        pack<T, 1, BN>(w, x);
        wgmma_fence();
        wgmma_mn_major<T, BN, C>(acc[0], w[0], tk);
        wgmma_commit();
        if (P::LEAN) {
            wgmma_wait<0>();
            fence_registers(acc[0]);
            if (lane == 0) pipe.release(now);
        }
        now.next();
    }
    wgmma_wait<0>();
    fence_registers(acc[0]);
    if (!P::LEAN && lo < hi && lane == 0) pipe.release(now.template before<1>());
    for (i32 n = hi; n < all; n++) pass();

#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[0][j][i] *= p.scale;
    const TileIndex done(p, tiles);
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM;
    dq += done.pair / p.heads * p.dq.batch + done.pair % p.heads * p.dq.head;
    // The warpgroup's rows of q are reused as space for its results.
    warpgroup_sync(group);
    store_result<B, Queries, T, 1, C>(acc, sq, dq, p.dq.row, start, p.t, p.d, read_tid() / 32 * 16, 0);
}

}  // namespace attention
