// Attention, forward, on sm_90a: what forward.cuh computes, with the products of warpgroups (wgmma) and tiles brought by
// the copy engine.
//
// Dao et al., FlashAttention (arXiv:2205.14135); Shah et al., FlashAttention-3 (arXiv:2407.08608), from which comes the
// order within a step: the scores of a tile are issued before the weights of the tile before it meet v, so that the
// exponentials run under products.
//
// One block takes BM = 64 GROUPS queries of one head and walks over the keys that they see, BN at a time; each of its
// warpgroups owns 64 rows. There is no warp that only copies: one thread of the last warpgroup, whose rows see the most
// keys under a causal mask, also feeds the copy engine, two tiles behind what it has itself worked off, so that a block
// keeps all registers for its rows and two blocks fit on a multiprocessor at D = 64.
//
// Shared memory: q BM x C; STAGES tiles of k and of v, BN x C each; barriers.
//
// Limits: exp2 and the tensor cores together at D = 64 (1,024 clocks each a 128 x 128 tile), the tensor cores at 128.
// Keys are walked in order; a warpgroup passes over tiles that none of its rows sees.
#pragma once
#include "attention/walk.cuh"
#include "device/warpgroup.cuh"

namespace attention {

template <int C_, int GROUPS_, int BN_, int STAGES_>
struct ForwardWgPlan {
    static constexpr int C = C_, GROUPS = GROUPS_, BN = BN_, STAGES = STAGES_;
    static constexpr int BM = 64 * GROUPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoDocuments>
__device__ __forceinline__ void forward_wg(
    const TensorMap& q, const TensorMap& k, const TensorMap& v, T* out, f32* lse, const Problem& p,
    const D& documents = {}) {
    constexpr int C = P::C, BM = P::BM, BN = P::BN, STAGES = P::STAGES, GROUPS = P::GROUPS;
    using Queries = Tile<C, BM>;
    using Keys = Tile<C, BN>;
    const i32 tiles = (p.t + BM - 1) / BM;
    const Place at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads, key_head = head / p.group;

    const u32 lane = threadIdx.x & 31, warp = warp_index(), group = warp / 4;
    const u32 sq = shared_address(shared_memory), sk = sq + Queries::BYTES, sv = sk + STAGES * Keys::BYTES;
    // Barriers: q; k and v brought; k and v used up.
    const u32 q_here = sv + STAGES * Keys::BYTES;
    const Ring<STAGES, GROUPS> ring_k(q_here + 8), ring_v(q_here + 8 + ring_k.BYTES);
    const bool leader = group == GROUPS - 1 && warp % 4 == 0 && lane == 0;

    const i32 top = first + (i32)group * 64;
    const OverKeys<BM, BN, 64, CAUSAL, WINDOW, D> walk(p, documents, batch, first, top);
    // Tiles of the block, and the first and last of those that this warpgroup sees.
    const i32 all = walk.steps(), hi = top < p.t ? walk.steps_to_last() : 0, lo = walk.steps_to_first(p, hi);

    auto fetch = [&](i32 n, u32 stage) {
        barrier_expect(ring_k.barrier(stage), Keys::BYTES);
        bring<C, BN>(sk + stage * Keys::BYTES, k, walk.begin + n * BN, key_head, batch, ring_k.barrier(stage));
        barrier_expect(ring_v.barrier(stage), Keys::BYTES);
        bring<C, BN>(sv + stage * Keys::BYTES, v, walk.begin + n * BN, key_head, batch, ring_v.barrier(stage));
    };
    if (leader) {
        barrier_make(q_here, 1);
        ring_k.make();
        ring_v.make();
        barriers_made();
        barrier_expect(q_here, Queries::BYTES);
        bring<C, BM>(sq, q, first, head, batch, q_here);
        for (i32 n = 0; n < min(all, STAGES); n++) fetch(n, n);
    }
    __syncthreads();

    // The tile being worked on; the place of the one two before it is filled anew.
    Turn<STAGES> now;
    i32 step = 0;
    auto feed = [&] {
        refill(leader, step, all, now, fetch, ring_k, ring_v);
        step++;
    };
    auto pass = [&] {
        feed();
        pass_over(lane, now, ring_k, ring_v);
    };

    f32 o[1][C / 8][4], x[1][BN / 8][4], peak[2], sum[2];
    u32 w[1][BN / 16][4];
#pragma unroll
    for (int j = 0; j < C / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[0][j][i] = 0.0f;
    peak[0] = peak[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
    const f32 scale2 = p.scale * LOG2E;

    // Scores to weights, with the row's running peak and sum; `fade` is what was added up so far times.
    f32 fade[2];
    bool grew;
    auto soften = [&](i32 key) {
        walk.template mask<1, BN>(x, p, key, top + (i32)(warp % 4) * 16, key);
        grew = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            f32 high = peak[h];
#pragma unroll
            for (int j = 0; j < BN / 8; j++) high = fmaxf(high, fmaxf(x[0][j][2 * h], x[0][j][2 * h + 1]));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
            f32 base = high == -infinity() ? 0.0f : high * scale2;
            fade[h] = power2(peak[h] * scale2 - base);
            grew |= high != peak[h];
            peak[h] = high;
            f32 add = 0.0f;
#pragma unroll
            for (int j = 0; j < BN / 8; j++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    x[0][j][i] = power2(x[0][j][i] * scale2 - base);
                    add += x[0][j][i];
                }
            sum[h] = sum[h] * fade[h] + add;
        }
    };

    barrier_wait(q_here, 0);
    const u32 my_q = sq + group * 64 * 128;
    for (i32 n = 0; n < lo; n++) pass();
    if (lo < hi) {
        feed();
        ring_k.wait(now);
        products_start();
        product_along<T, C, BM, BN>(x[0], my_q, sk + now.stage * Keys::BYTES);
        products_end();
        products_wait<0>();
        settle(x[0]);
        if (lane == 0) ring_k.leave(now);
        soften(walk.begin + lo * BN);
        pack<T, 1, BN>(w, x);
    }
#pragma unroll 1
    for (i32 n = lo + 1; n < hi; n++) {
        now.next();
        feed();
        const Turn<STAGES> before = now.template before<1>();
        ring_k.wait(now);
        products_start();
        product_along<T, C, BM, BN>(x[0], my_q, sk + now.stage * Keys::BYTES);
        products_end();
        ring_v.wait(before);
        products_start();
        product_down<T, BN, C>(o[0], w[0], sv + before.stage * Keys::BYTES);
        products_end();
        products_wait<1>();
        settle(x[0]);
        if (lane == 0) ring_k.leave(now);
        soften(walk.begin + n * BN);
        products_wait<0>();
        settle(o[0]);
        if (lane == 0) ring_v.leave(before);
        if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
            for (int j = 0; j < C / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[0][j][i] *= fade[i / 2];
        }
        pack<T, 1, BN>(w, x);
    }
    if (lo < hi) {
        ring_v.wait(now);
        products_start();
        product_down<T, BN, C>(o[0], w[0], sv + now.stage * Keys::BYTES);
        products_end();
        products_wait<0>();
        settle(o[0]);
        if (lane == 0) ring_v.leave(now);
        now.next();
    }
    for (i32 n = hi; n < all; n++) pass();

    const Place done(p, tiles);
    const u32 tid = thread_now();
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
            lse[(i64)done.pair * p.t + r] = total > 0.0f ? peak[h] * p.scale + __logf(total) : 0.0f;
    }
    out += done.pair / p.heads * p.out.batch + done.pair % p.heads * p.out.head;
    // The warpgroup's rows of q are its room for the results.
    warpgroup_meet(group);
    Queries::template store<T, 1, C>(o, sq, out, p.out.row, start, p.t, p.e, mine, 0);
}

}  // namespace attention
