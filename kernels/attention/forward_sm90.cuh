// Computes the forward pass of flash attention on 16-bit floats with wgmma and TMA (sm_90a): shapes and results as in
// forward.cuh.
//
// Dao et al., FlashAttention (arXiv:2205.14135); Shah et al., FlashAttention-3 (arXiv:2407.08608), whose overlap within
// a warpgroup is used here: the scores of a tile are issued before p v of the previous tile, so that exponentials
// overlap wgmma.
//
// Mapping: one block takes BM = 64 GROUPS queries of one head and loops over the visible keys, BN at a time; each
// warpgroup owns 64 rows. There is no producer warp: one thread of the last warpgroup, whose rows have the most visible
// keys under a causal mask, also issues the TMA loads; it refills a stage two tiles after it was consumed. A block
// therefore keeps all registers for its rows, and two blocks fit on a multiprocessor at D = 64.
//
// Shared memory: q BM x C; STAGES tiles of k and of v, BN x C each; mbarriers.
//
// Limits: exp2 and the tensor cores equally at D = 64 (1,024 clocks each for a 128 x 128 tile), the tensor cores at D =
// 128. Keys are visited in order; a warpgroup skips tiles without keys visible to its rows.
#pragma once
#include "attention/mask_range.cuh"
#include "device/warpgroup.cuh"

namespace attention {

template <int C_, int GROUPS_, int BN_, int STAGES_>
struct ForwardSm90Plan {
    static constexpr int C = C_, GROUPS = GROUPS_, BN = BN_, STAGES = STAGES_;
    static constexpr int BM = 64 * GROUPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void forward_sm90(
    const TensorMap& q, const TensorMap& k, const TensorMap& v, typename B::template Result<T>* out, f32* lse, const Problem& p,
    const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, BM = P::BM, BN = P::BN, STAGES = P::STAGES, GROUPS = P::GROUPS;
    using Queries = Tile<C, BM>;
    using Keys = Tile<C, BN>;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads, key_head = head / p.group;

    const u32 lane = threadIdx.x & 31, warp = warp_index(), group = warp / 4;
    const u32 sq = shared_address(shared_memory), sk = sq + Queries::BYTES, sv = sk + STAGES * Keys::BYTES;
    // Barriers: q loaded; k and v loaded; k and v consumed.
    const u32 q_here = sv + STAGES * Keys::BYTES;
    const Pipeline<STAGES, GROUPS> pipe_k(q_here + 8), pipe_v(q_here + 8 + pipe_k.BYTES);
    const bool leader = group == GROUPS - 1 && warp % 4 == 0 && lane == 0;

    const i32 top = first + (i32)group * 64;
    const KeyRange<BM, BN, 64, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);
    // Tiles of the block, and the first and last of those that contain keys visible to this warpgroup.
    const i32 all = range.steps(), hi = top < p.t ? range.steps_to_last() : 0, lo = range.steps_to_first(p, hi);

    auto fetch = [&](i32 n, u32 stage) {
        mbarrier_expect_tx(pipe_k.barrier(stage), Keys::BYTES);
        tma_load<C, BN>(sk + stage * Keys::BYTES, k, range.begin + n * BN, key_head, batch, pipe_k.barrier(stage));
        mbarrier_expect_tx(pipe_v.barrier(stage), Keys::BYTES);
        tma_load<C, BN>(sv + stage * Keys::BYTES, v, range.begin + n * BN, key_head, batch, pipe_v.barrier(stage));
    };
    if (leader) {
        mbarrier_init(q_here, 1);
        pipe_k.make();
        pipe_v.make();
        fence_mbarrier_init();
        mbarrier_expect_tx(q_here, Queries::BYTES);
        tma_load<C, BM>(sq, q, first, head, batch, q_here);
        for (i32 n = 0; n < min(all, STAGES); n++) fetch(n, n);
    }
    __syncthreads();

    // The tile being consumed; the stage of the tile two before it is refilled.
    PipelineState<STAGES> now;
    i32 step = 0;
    auto feed = [&] {
        refill(leader, step, all, now, fetch, pipe_k, pipe_v);
        step++;
    };
    auto pass = [&] {
        feed();
        skip_tile(lane, now, pipe_k, pipe_v);
    };

    f32 o[1][C / 8][4], x[1][BN / 8][4], row_max[2], sum[2];
    u32 w[1][BN / 16][4];
#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[0][j][i] = 0.0f;
    row_max[0] = row_max[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
    const f32 scale2 = p.scale * LOG2E;

    // Online softmax: converts scores to weights with the row's running maximum and sum; `rescale` multiplies the
    // values accumulated so far.
    f32 rescale[2];
    bool max_grew;
    auto softmax_step = [&](i32 key) {
        range.template mask<1, BN>(x, p, key, top + (i32)(warp % 4) * 16, key);
        max_grew = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            f32 high = row_max[h];
#pragma unroll
            for (int j = 0; j < BN / 8; j++) high = fmaxf(high, fmaxf(x[0][j][2 * h], x[0][j][2 * h + 1]));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
            f32 base = high == -infinity() ? 0.0f : high * scale2;
            rescale[h] = exp2_approx(row_max[h] * scale2 - base);
            max_grew |= high != row_max[h];
            row_max[h] = high;
            f32 add = 0.0f;
#pragma unroll
            for (int j = 0; j < BN / 8; j++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    x[0][j][i] = exp2_approx(x[0][j][i] * scale2 - base);
                    add += x[0][j][i];
                }
            sum[h] = sum[h] * rescale[h] + add;
        }
    };

    mbarrier_wait(q_here, 0);
    const u32 my_q = sq + group * 64 * 128;
    for (i32 n = 0; n < lo; n++) pass();
    if (lo < hi) {
        feed();
        pipe_k.wait(now);
        wgmma_fence();
        wgmma_k_major<T, C, BM, BN>(x[0], my_q, sk + now.stage * Keys::BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(x[0]);
        if (lane == 0) pipe_k.release(now);
        softmax_step(range.begin + lo * BN);
        pack<T, 1, BN>(w, x);
    }
#pragma unroll 1
    for (i32 n = lo + 1; n < hi; n++) {
        now.next();
        feed();
        const PipelineState<STAGES> before = now.template before<1>();
        pipe_k.wait(now);
        wgmma_fence();
        wgmma_k_major<T, C, BM, BN>(x[0], my_q, sk + now.stage * Keys::BYTES);
        wgmma_commit();
        pipe_v.wait(before);
        wgmma_fence();
        wgmma_mn_major<T, BN, C>(o[0], w[0], sv + before.stage * Keys::BYTES);
        wgmma_commit();
        wgmma_wait<1>();
        fence_registers(x[0]);
        if (lane == 0) pipe_k.release(now);
        softmax_step(range.begin + n * BN);
        wgmma_wait<0>();
        fence_registers(o[0]);
        if (lane == 0) pipe_v.release(before);
        if (__any_sync(0xffffffffu, max_grew)) {
#pragma unroll
            for (int j = 0; j < C / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[0][j][i] *= rescale[i / 2];
        }
        pack<T, 1, BN>(w, x);
    }
    if (lo < hi) {
        pipe_v.wait(now);
        wgmma_fence();
        wgmma_mn_major<T, BN, C>(o[0], w[0], sv + now.stage * Keys::BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(o[0]);
        if (lane == 0) pipe_v.release(now);
        now.next();
    }
    for (i32 n = hi; n < all; n++) pass();

    const TileIndex done(p, tiles);
    const u32 tid = read_tid();
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM, mine = (i32)(tid / 32) * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        f32 total = sum[h];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        f32 by = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            o[0][j][2 * h] *= by;
            o[0][j][2 * h + 1] *= by;
        }
        i32 r = start + mine + (i32)(tid & 31) / 4 + h * 8;
        if (lse && (tid & 3) == 0 && r < p.t)
            lse[(i64)done.pair * p.t + r] = total > 0.0f ? row_max[h] * p.scale + __logf(total) : B::empty();
    }
    out += done.pair / p.heads * p.out.batch + done.pair % p.heads * p.out.head;
    // The warpgroup's rows of q are reused as space for its results.
    warpgroup_sync(group);
    store_result<B, Queries, T, 1, C>(o, sq, out, p.out.row, start, p.t, p.e, mine, 0);
}

}  // namespace attention
