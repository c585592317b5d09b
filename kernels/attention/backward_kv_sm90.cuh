// Computes the gradients of flash attention with respect to keys and values, with wgmma and TMA (sm_90a): results as in
// backward_kv.cuh, pipeline as in forward_sm90.cuh.
//
// `stats` (B, H, padded, 2) holds (lse log2(e), delta) of each row (backward_q_sm90.cuh); padded is a multiple of BN.
//
// Mapping: one block takes BM = 64 GROUPS keys of one key head and loops over the queries that attend to them, BN at a
// time, for all r query heads that share the key head, in a fixed order. Everything is computed transposed, with keys
// as rows: p^T and ds^T are the left operands of the next two products without leaving the registers.
//
// LEAN: v grad^T is issued after the softmax weights, together with dv += p^T grad. This needs fewer registers, and the
// other warpgroups keep the tensor cores busy.
//
// Shared memory: k and v, BM x C each; STAGES tiles of q and of grad, BN x C each, with BN pairs of stats; mbarriers.
//
// Limits: shared memory bandwidth, then the tensor cores. Registers: dk and dv C / 2 each, scores and their gradient BN / 2 each,
// weights BN / 4.
#pragma once
#include "attention/mask_range.cuh"
#include "device/warpgroup.cuh"

namespace attention {

template <int C_, int GROUPS_, int BN_, int STAGES_, bool LEAN_>
struct BackwardKVSm90Plan {
    static constexpr int C = C_, GROUPS = GROUPS_, BN = BN_, STAGES = STAGES_;
    static constexpr bool LEAN = LEAN_;
    static constexpr int BM = 64 * GROUPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void backward_kv_sm90(
    const TensorMap& q, const TensorMap& k, const TensorMap& v, const TensorMap& grad, const float2* stats,
    typename B::template Result<T>* dk, typename B::template Result<T>* dv, const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, BM = P::BM, BN = P::BN, STAGES = P::STAGES, GROUPS = P::GROUPS;
    using Keys = Tile<C, BM>;
    using Queries = Tile<C, BN>;
    constexpr u32 STATS = BN * 8;
    const TileIndex at(p, (p.s + BM - 1) / BM);
    const i32 first = at.tile * BM;
    const i32 batch = at.pair / p.groups, key_head = at.pair % p.groups;

    const u32 lane = threadIdx.x & 31, warp = warp_index(), group = warp / 4;
    const u32 sk = shared_address(shared_memory), sv = sk + Keys::BYTES;
    const u32 sq = sv + Keys::BYTES, sg = sq + STAGES * Queries::BYTES, sn = sg + STAGES * Queries::BYTES;
    // Barriers: k and v loaded; q, grad and stats loaded; q, grad and stats consumed.
    const u32 rows_here = sn + STAGES * STATS;
    const Pipeline<STAGES, GROUPS, 32> pipe(rows_here + 8);
    const bool leader = group == 0 && warp % 4 == 0 && lane == 0;

    const i32 top = first + (i32)group * 64;
    const QueryRange<BM, BN, 64, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);
    // Steps of one head, and of all heads that share these keys.
    const i32 each = range.steps(), all = each * p.group;

    auto fetch = [&](i32 n, u32 stage) {
        const u32 barrier = pipe.barrier(stage);
        const i32 turn = p.group == 1 ? 0 : n / each;
        const i32 query_head = key_head * p.group + turn, row = range.begin + (n - turn * each) * BN;
        mbarrier_expect_tx(barrier, 2 * Queries::BYTES + STATS);
        tma_load<C, BN>(sq + stage * Queries::BYTES, q, row, query_head, batch, barrier);
        tma_load<C, BN>(sg + stage * Queries::BYTES, grad, row, query_head, batch, barrier);
        bulk_copy(
            sn + stage * STATS, stats + ((i64)batch * p.heads + query_head) * p.padded + row, STATS, barrier);
    };
    if (leader) {
        mbarrier_init(rows_here, 1);
        pipe.make();
        fence_mbarrier_init();
        mbarrier_expect_tx(rows_here, 2 * Keys::BYTES);
        tma_load<C, BM>(sk, k, first, key_head, batch, rows_here);
        tma_load<C, BM>(sv, v, first, key_head, batch, rows_here);
        for (i32 n = 0; n < min(all, STAGES); n++) fetch(n, n);
    }
    __syncthreads();

    f32 ak[1][C / 8][4], av[1][C / 8][4];
#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) ak[0][j][i] = av[0][j][i] = 0.0f;
    const f32 scale2 = p.scale * LOG2E;
    const u32 my_k = sk + group * 64 * 128, my_v = sv + group * 64 * 128;

    PipelineState<STAGES> now;
    i32 query = range.begin;
    bool busy = false;  // products of the previous tile are in flight
    mbarrier_wait(rows_here, 0);
#pragma unroll 1
    for (i32 n = 0; n < all; n++) {
        refill(leader, n, all, now, fetch, pipe);
        const bool active = top < p.s && range.sees(p, query);
        if (active) {
            const u32 tq = sq + now.stage * Queries::BYTES, tg = sg + now.stage * Queries::BYTES;
            const u32 numbers_at = sn + now.stage * STATS + (lane & 3) * 16;
            f32 x[1][BN / 8][4], y[1][BN / 8][4];
            u32 w[1][BN / 16][4];
            pipe.wait(now);
            wgmma_fence();
            wgmma_k_major<T, C, BM, BN>(x[0], my_k, tq);
            wgmma_commit();
            if (!P::LEAN) {
                wgmma_k_major<T, C, BM, BN>(y[0], my_v, tg);
                wgmma_commit();
            }
            // Wait for the scores, and with them the last products of the previous tile.
            wgmma_wait<P::LEAN ? 0 : 1>();
            fence_registers(x[0]);
            fence_registers(ak[0]);
            fence_registers(av[0]);
            if (busy) pipe.release(now.template before<1>());
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                // lse and delta of this thread's two columns.
                uint4 bits = load_shared4(numbers_at + j * 64);
                f32 base[2] = {__uint_as_float(bits.x), __uint_as_float(bits.z)};
#pragma unroll
                for (int i = 0; i < 4; i++) x[0][j][i] = exp2_approx(x[0][j][i] * scale2 - base[i & 1]);
            }
            range.template mask<1, BN>(x, p, query, top + (i32)(warp % 4) * 16, query);
            pack<T, 1, BN>(w, x);
            if (!P::LEAN) {
                wgmma_wait<0>();
                fence_registers(y[0]);
            }
            wgmma_fence();
            if (P::LEAN) wgmma_k_major<T, C, BM, BN>(y[0], my_v, tg);
            wgmma_mn_major<T, BN, C>(av[0], w[0], tg);
            wgmma_commit();
            if (P::LEAN) {
                wgmma_wait<0>();
                fence_registers(y[0]);
                fence_registers(av[0]);
            }
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                uint4 bits = load_shared4(numbers_at + j * 64);
                f32 del[2] = {__uint_as_float(bits.y), __uint_as_float(bits.w)};
#pragma unroll
                for (int i = 0; i < 4; i++) x[0][j][i] *= y[0][j][i] - del[i & 1];
            }
            u32 u[1][BN / 16][4];
            pack<T, 1, BN>(u, x);
            wgmma_fence();
            wgmma_mn_major<T, BN, C>(ak[0], u[0], tq);
            wgmma_commit();
            busy = true;
        } else {
            wgmma_wait<0>();
            fence_registers(ak[0]);
            fence_registers(av[0]);
            if (busy) pipe.release(now.template before<1>());
            pipe.wait(now);
            pipe.release(now);
            busy = false;
        }
        query += BN;
        if (query >= range.end) query = range.begin;
        now.next();
    }
    wgmma_wait<0>();
    fence_registers(ak[0]);
    fence_registers(av[0]);
#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) ak[0][j][i] *= p.scale;
    const TileIndex done(p, (p.s + BM - 1) / BM);
    dk += done.pair / p.groups * p.dk.batch + done.pair % p.groups * p.dk.head;
    dv += done.pair / p.groups * p.dv.batch + done.pair % p.groups * p.dv.head;
    // The warpgroup's rows of k and v are reused as space for its results.
    warpgroup_sync(group);
    const i32 start = done.tile * BM, mine = read_tid() / 32 * 16;
    store_result<B, Keys, T, 1, C>(ak, sk, dk, p.dk.row, start, p.s, p.d, mine, 0);
    store_result<B, Keys, T, 1, C>(av, sv, dv, p.dv.row, start, p.s, p.e, mine, 0);
}

}  // namespace attention
