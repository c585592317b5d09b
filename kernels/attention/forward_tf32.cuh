// Computes the forward pass of flash attention in f32 with TF32 tensor cores (tf32.cuh): shapes and results as in
// forward.cuh.
//
// Mapping: one block takes BM queries of one head and loops over the visible keys, BN at a time. A warp owns 16 MT rows
// from the scores to the result and keeps a tile's softmax weights in registers. With SIDE = 2, two warps share their
// rows and exchange row maxima and weights through shared memory.
//
// Shared memory: q BM x C, then STAGES tiles of k and of v, BN x C each, as in forward.cuh; with SIDE = 2 also BM x BN
// weights and two floats per row.
//
// Limits: with three products, TF32 mma.sync; with one product, shared memory and operand conversion. Registers: out 16
// MT C / SIDE, scores 16 MT BN / SIDE, one chunk of a tile's sums 16 MT 32, over 32 lanes.
#pragma once
#include "attention/tf32.cuh"

namespace attention {

// Combines the values of two adjacent warps for their common rows, independently of the warps' order.
template <typename P, typename F>
__device__ __forceinline__ void exchange(f32 (&x)[P::MT][2], f32* room, F both) {
    const i32 tid = read_tid(), side = P::side(tid);
    f32* const at = room + P::rows(tid) * P::ROWS + tid % 32 / 4;
#pragma unroll
    for (int m = 0; m < P::MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (tid % 4 == 0) at[side * P::BM + m * 16 + h * 8] = x[m][h];
    pair_sync<P>();
#pragma unroll
    for (int m = 0; m < P::MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) x[m][h] = both(x[m][h], at[(side ^ 1) * P::BM + m * 16 + h * 8]);
}

template <typename P, bool CAUSAL, bool WINDOW, typename D = NoSegmentIds, typename B = AllKeys>
__device__ __forceinline__ void forward_tf32(
    const f32* q, const f32* k, const f32* v, f32* out, f32* lse, const Problem& p, const D& segments = {}, const B& keys = {}) {
    constexpr int MT = P::MT, BM = P::BM, BN = P::BN, KEYS = P::KEYS;
    constexpr i32 TILE = BN * P::PITCH;
    const i32 tiles = (p.t + BM - 1) / BM;
    const TileIndex at(p, tiles);
    const i32 first = (CAUSAL ? tiles - 1 - at.tile : at.tile) * BM;
    const i32 batch = at.pair / p.heads, head = at.pair % p.heads;
    q += batch * p.q.batch + head * p.q.head;
    k += batch * p.k.batch + head / p.group * p.k.head;
    v += batch * p.v.batch + head / p.group * p.v.head;

    f32* const sq = shared_f32();
    f32* const sk = sq + BM * P::PITCH;
    f32* const sv = sk + P::STAGES * TILE;
    f32* const sw = sv + P::STAGES * TILE;
    f32* const peaks = sw + BM * P::WIDE;  // for SIDE = 2: BM per side, at the end the sums
    const i32 top = first + (i32)warp_index() / P::SIDE * P::ROWS;
    const KeyRange<BM, BN, P::ROWS, CAUSAL, WINDOW, D, B> range(p, segments, batch, first, top, keys);

    f32 o[MT][P::COLUMNS / 8][4], base[MT][2], sum[MT][2];
    clear(o);
#pragma unroll
    for (int m = 0; m < MT; m++) {
        base[m][0] = base[m][1] = -infinity();
        sum[m][0] = sum[m][1] = 0.0f;
    }
    load_tile_f32<P, BM>(sq, q, p.q.row, first, p.t, p.d);
    if (range.begin < range.end) {
        load_tile_f32<P, BN>(sk, k, p.k.row, range.begin, p.s, p.d);
        if (P::STAGES == 2) load_tile_f32<P, BN>(sv, v, p.v.row, range.begin, p.s, p.e);
    }
    cp_async_commit();
    // Bases are rounded to log2 once, so that equal ones give a rescaling factor of exactly 1.
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
        }
        if (P::STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
            if (key + BN < range.end) load_tile_f32<P, BN>(sk, k, p.k.row, key + BN, p.s, p.d);
            cp_async_commit();
        }
        if (active) {
            f32 rescale[MT][2], high[MT][2];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    f32 most = fmaxf(x[m][0][2 * h], x[m][0][2 * h + 1]);
#pragma unroll
                    for (int j = 1; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(x[m][j][2 * h], x[m][j][2 * h + 1]));
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                    high[m][h] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                }
            if constexpr (P::SIDE == 2) exchange<P>(high, peaks, [](f32 a, f32 b) { return fmaxf(a, b); });
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // A row without a visible key so far keeps its -inf; its weights are 2^-inf.
                    const f32 next = fmaxf(base[m][h], high[m][h] * scale2), by = next == -infinity() ? 0.0f : next;
                    rescale[m][h] = exp2_approx(base[m][h] - by);
                    base[m][h] = next;
                    f32 add = 0.0f;
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                        for (int i = 2 * h; i < 2 * h + 2; i++) {
                            x[m][j][i] = exp2_approx(__fmaf_rn(x[m][j][i], scale2, -by));
                            add += x[m][j][i];
                        }
                    sum[m][h] = __fmaf_rn(sum[m][h], rescale[m][h], add);
                }
            const auto fades = [&](int m, int h) { return rescale[m][h]; };
            if constexpr (P::SIDE == 1) {
                weighted_tf32<P>(o, RegisterWeights<P>{x}, sv + here + P::down(), fades);
            } else {
                const SharedWeights<P> both{sw + P::weights()};
                both.put(x);
                pair_sync<P>();
                weighted_tf32<P>(o, both, sv + here + P::down(), fades);
            }
        } else {
            pair_sync_idle<P, 2>();
        }
        if (P::STAGES == 2) here = TILE - here;
    }
    cp_async_wait<0>();

    const TileIndex done(p, tiles);
    const i32 start = (CAUSAL ? tiles - 1 - done.tile : done.tile) * BM;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], 2);
        }
    if constexpr (P::SIDE == 2) exchange<P>(sum, peaks, [](f32 a, f32 b) { return a + b; });
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const f32 total = sum[m][h];
            sum[m][h] = total > 0.0f ? 1.0f / total : 0.0f;
            const i32 tid = read_tid(), row = start + P::rows(tid) * P::ROWS + m * 16 + h * 8 + tid % 32 / 4;
            if (lse && tid % 4 == 0 && P::side(tid) == 0 && row < p.t)
                lse[(i64)done.pair * p.t + row] = total > 0.0f ? __fmaf_rn(base[m][h], LN2, logf(total)) : B::empty();
        }
    out += done.pair / p.heads * p.out.batch + done.pair % p.heads * p.out.head;
    store_tile_f32<P>(o, [&](int m, int h) { return sum[m][h]; }, out, p.out.row, start, p.t, p.e);
}

}  // namespace attention
