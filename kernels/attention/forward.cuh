// Computes flash attention, forward, on 16-bit floats with mma.sync (sm_80 and later): q (B, H, T, D), k (B, G, S, D),
// v (B, G, S, E) -> out (B, H, T, E) and lse (B, H, T), the logarithm of each row's sum of exponentials. A row without
// visible keys has lse 0 and out 0.
//
// Dao et al., FlashAttention (arXiv:2205.14135); Dao, FlashAttention-2 (arXiv:2307.08691); online softmax after Milakov and
// Gimelshein (arXiv:1805.02867).
//
// Mapping: one block takes BM = 16 MT WARPS queries of one head and loops over the visible keys, BN at a time. A warp
// owns 16 MT rows from the scores to the result, so rows are never reduced across warps. With MT = 2, each fragment of
// k and v that ldmatrix loads feeds two mma.sync, so that shared memory (128 bytes per clock) does not limit the tensor
// cores. The softmax weights go from accumulators to the next operand in registers.
//
// Shared memory: q BM x C, then STAGES tiles of k and of v, BN x C each. With two stages, the copies of a step overlap
// the whole previous step, with one barrier per step. With one stage, v is copied during q k^T, and k during the
// softmax and p v.
//
// Limits: mma.sync issue, then exp2 and the register file (D = 64: out 64 + scores 64 + q 32 of about 168 registers).
// Keys are visited in order from the first visible one. Only tiles at an edge of the mask or of the keys are masked; a
// warp skips tiles without keys visible to its rows.
#pragma once
#include "attention/mask_range.cuh"

namespace attention {

template <int C_, int WARPS_, int MT_, int BN_, int STAGES_, bool IN_REGISTERS_>
struct ForwardPlan {
    static constexpr int C = C_, WARPS = WARPS_, MT = MT_, BN = BN_, STAGES = STAGES_;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    static constexpr int BM = 16 * MT * WARPS;
    static constexpr int THREADS = 32 * WARPS;
};

template <typename T, typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void forward(
    const T* q, const T* k, const T* v, typename B::template Result<T>* out, f32* lse, const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int C = P::C, MT = P::MT, BM = P::BM, BN = P::BN, THREADS = P::THREADS;
    using Queries = Tile<C, BM>;
    using Keys = Tile<C, BN>;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;

    const u32 lane = threadIdx.x & 31, warp = warp_index();
    const u32 sq = shared_address(shared_memory), sk = sq + Queries::BYTES, sv = sk + P::STAGES * Keys::BYTES;
    const i32 top = first + (i32)warp * MT * 16;
    const KeyRange<BM, BN, MT * 16, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);

    typename LeftOperand<P::IN_REGISTERS, Queries, MT>::Type left(sq, warp * MT * 16, lane);
    const u32 bk = sk + Keys::lane_along(lane), bv = sv + Keys::lane_down(lane);

    f32 o[MT][C / 8][4], row_max[MT][2], sum[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int j = 0; j < C / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[m][j][i] = 0.0f;
        row_max[m][0] = row_max[m][1] = -infinity();
        sum[m][0] = sum[m][1] = 0.0f;
    }

    Queries::template load<THREADS>(sq, q, p.q.row, first, p.t, p.d);
    cp_async_commit();
    if (range.begin < range.end) {
        Keys::template load<THREADS>(sk, k, p.k.row, range.begin, p.s, p.d);
        if (P::STAGES == 2) Keys::template load<THREADS>(sv, v, p.v.row, range.begin, p.s, p.e);
    }
    cp_async_commit();
    if (P::IN_REGISTERS) {
        cp_async_wait<1>();
        __syncthreads();
        left.fetch();
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
            scores<T, Keys, MT, BN>(x, left, bk + here);
            range.template mask<MT, BN>(x, p, key, top, key);
        }
        if (P::STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
            if (key + BN < range.end) Keys::template load<THREADS>(sk, k, p.k.row, key + BN, p.s, p.d);
            cp_async_commit();
        }
        if (active) {
            f32 rescale[MT][2];
            bool max_grew = false;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    f32 high = row_max[m][h];
#pragma unroll
                    for (int j = 0; j < BN / 8; j++) high = fmaxf(high, fmaxf(x[m][j][2 * h], x[m][j][2 * h + 1]));
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                    // A row without a visible key so far keeps its -inf; its weights are 2^-inf.
                    f32 base = high == -infinity() ? 0.0f : high * scale2;
                    rescale[m][h] = exp2_approx(row_max[m][h] * scale2 - base);
                    max_grew |= high != row_max[m][h];
                    row_max[m][h] = high;
                    f32 add = 0.0f;
#pragma unroll
                    for (int j = 0; j < BN / 8; j++)
#pragma unroll
                        for (int i = 2 * h; i < 2 * h + 2; i++) {
                            x[m][j][i] = exp2_approx(x[m][j][i] * scale2 - base);
                            add += x[m][j][i];
                        }
                    sum[m][h] = sum[m][h] * rescale[m][h] + add;
                }
            // Once the row maxima stop growing, no rescaling is needed, and most tiles skip this.
            if (__any_sync(0xffffffffu, max_grew)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int j = 0; j < C / 8; j++)
#pragma unroll
                        for (int i = 0; i < 4; i++) o[m][j][i] *= rescale[m][i / 2];
            }
            u32 w[MT][BN / 16][4];
            pack<T, MT, BN>(w, x);
            weighted<T, Keys, MT, BN, C>(o, w, bv + here, 0);
        }
        stage ^= 1;
    }
    cp_async_wait<0>();
    // If there are no keys, other warps' copies of q into this warp's rows may still be in flight.
    if (range.begin >= range.end) __syncthreads();

    const TileIndex done(p, tiles);
    const u32 tid = read_tid();
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM, mine = (i32)(tid / 32) * MT * 16;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            f32 total = sum[m][h];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            f32 by = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
            for (int j = 0; j < C / 8; j++) {
                o[m][j][2 * h] *= by;
                o[m][j][2 * h + 1] *= by;
            }
            i32 r = start + mine + (i32)(tid & 31) / 4 + m * 16 + h * 8;
            if (lse && (tid & 3) == 0 && r < p.t)
                lse[(i64)done.pair * p.t + r] = total > 0.0f ? row_max[m][h] * p.scale + __logf(total) : B::empty();
        }
    out += done.pair / p.heads * p.out.batch + done.pair % p.heads * p.out.head;
    __syncwarp();
    store_result<B, Queries, T, MT, C>(o, sq, out, p.out.row, start, p.t, p.e, mine, 0);
}

}  // namespace attention
