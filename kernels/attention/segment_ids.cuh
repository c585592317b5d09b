// Masks attention by segment ids (packed documents): in addition to the other masks, query i attends to key j only if
// both positions have the same id.
//
// `segment_bounds` reads the ids once and writes what the attention kernels read: `labels`, the ids in 32 bits, and for
// each BOUND_BLOCK positions the range of keys visible to them. Ids may come in any order. Keys outside the bounds are
// never loaded; within them, only tiles whose labels may differ are compared label by label. Non-decreasing ids, as
// packed documents have, give tight bounds.
//
// Queries and keys have the same positions, so the bounds of a block of queries are also those of the queries that
// attend to a block of keys.
#pragma once
#include "attention/tile.cuh"

namespace attention {

constexpr i32 BOUND_BLOCK = 64;

// The loads are volatile so that the compiler does not hoist them: registers are scarce.
__device__ __forceinline__ i32 load_label(const i32* at) {
    i32 y;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(y) : "l"(at));
    return y;
}
__device__ __forceinline__ int2 load_label_pair(const i32* at) {
    int2 y;
    asm volatile("ld.global.v2.s32 {%0, %1}, [%2];" : "=r"(y.x), "=r"(y.y) : "l"(at));
    return y;
}

// Segment ids of a kernel without documents ...
struct NoSegmentIds {
    static constexpr bool ON = false;
    __device__ __forceinline__ NoSegmentIds of(i32, const Problem&) const { return {}; }
};

// ... and of one with documents.
struct SegmentIds {
    static constexpr bool ON = true;
    const i32* labels;   // (B, padded)
    const int4* bounds;  // (B, T / BOUND_BLOCK rounded up): first and last + 1 visible key, then the same for keys visible to all

    // The segment ids of one batch.
    __device__ __forceinline__ SegmentIds of(i32 batch, const Problem& p) const {
        return {labels + batch * p.padded, bounds + batch * ((p.t + BOUND_BLOCK - 1) / BOUND_BLOCK)};
    }
    // The keys visible to the ROWS rows starting at `first`, a multiple of ROWS: from the bounds of whole blocks, or of
    // the block that contains the rows.
    template <int ROWS>
    __device__ __forceinline__ int2 span(i32 first, i32 t) const {
        static_assert(ROWS % BOUND_BLOCK == 0 || BOUND_BLOCK % ROWS == 0);
        int2 y = make_int2(t, 0);
#pragma unroll
        for (int i = 0; i < ROWS; i += BOUND_BLOCK)
            if (first + i < t) {
                int4 one = bounds[(first + i) / BOUND_BLOCK];
                y.x = min(y.x, one.x);
                y.y = max(y.y, one.y);
            }
        return y;
    }
    // The bounds of the block that contains `row`; empty past the end.
    __device__ __forceinline__ int4 at(i32 row, i32 t) const {
        return row < t ? bounds[row / BOUND_BLOCK] : make_int4(0, 0, 0, 0);
    }
    // Sets a warp's elements whose row and column belong to different documents to `by`; `row` and `column` are the
    // warp's first. Labels are reloaded for each row, because registers are scarcer here than loads that hit the cache.
    template <int MT, int N>
    __device__ __forceinline__ void apply_mask(f32 (&x)[MT][N / 8][4], i32 row, i32 column, f32 by) const {
        const i32 tid = read_tid();
        const i32 *rows = labels + row + tid % 32 / 4, *columns = labels + column + tid % 4 * 2;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 r = load_label(rows + m * 16 + h * 8);
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    const int2 c = load_label_pair(columns + j * 8);
                    x[m][j][2 * h] = c.x == r ? x[m][j][2 * h] : by;
                    x[m][j][2 * h + 1] = c.y == r ? x[m][j][2 * h + 1] : by;
                }
            }
    }
};

// ---- computing labels and bounds -----------------------------------------------------------------------------------

// Any view of the ids (leading dims, T); `dims` are the leading dims, padded in front with 1.
struct SegmentParams {
    i64 dims[7], strides[7];
    i64 stride;  // stride between positions
    i32 t, padded;
};

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 most(i64 a, i64 b) { return a > b ? a : b; }

// A thread block of 256 threads processes one block of positions of one batch and reads all of its T ids.
//
// Ids beyond 32 bits are labelled with the first position that has the same id, so that labels stay exact.
__device__ __forceinline__ void segment_bounds(const i64* ids, i32* labels, int4* bounds, const SegmentParams& p) {
    __shared__ i64 low[8], high[8];
    __shared__ i32 ends[8][4];
    const i32 blocks = (p.t + BOUND_BLOCK - 1) / BOUND_BLOCK;
    const i32 batch = blockIdx.x / blocks, block = blockIdx.x - batch * blocks;
    const i32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    i64 rest = batch;
#pragma unroll
    for (int i = 6; i >= 0; i--) {
        const i64 up = rest / p.dims[i];
        ids += (rest - up * p.dims[i]) * p.strides[i];
        rest = up;
    }
    labels += (i64)batch * p.padded;
    const i32 first = block * BOUND_BLOCK, last = min(first + BOUND_BLOCK, p.t) - 1;

    // The range of the ids in this block.
    i64 lo = ids[min(first + tid, last) * p.stride], hi = lo;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        lo = least(lo, __shfl_xor_sync(~0u, lo, d));
        hi = most(hi, __shfl_xor_sync(~0u, hi, d));
    }
    if (lane == 0) low[warp] = lo, high[warp] = hi;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 8; w++) lo = least(lo, low[w]), hi = most(hi, high[w]);

    // The range from the first to the last position with an id in that range. If the block has a single id, also the
    // surrounding positions without any other id.
    i32 from = p.t, to = 0, left = 0, right = p.t;
    bool wide = false;
    for (i32 i = tid; i < p.t; i += 256) {
        const i64 x = ids[i * p.stride];
        wide |= x != (i64)(i32)x;
        if (lo <= x && x <= hi) {
            from = min(from, i);
            to = i + 1;
        }
        if (x != lo) {
            if (i < first) left = i + 1;
            if (i > last) right = min(right, i);
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        from = min(from, __shfl_xor_sync(~0u, from, d));
        to = max(to, __shfl_xor_sync(~0u, to, d));
        left = max(left, __shfl_xor_sync(~0u, left, d));
        right = min(right, __shfl_xor_sync(~0u, right, d));
    }
    if (lane == 0) ends[warp][0] = from, ends[warp][1] = to, ends[warp][2] = left, ends[warp][3] = right;
    wide = __syncthreads_or(wide);
#pragma unroll
    for (int w = 0; w < 8; w++) {
        from = min(from, ends[w][0]);
        to = max(to, ends[w][1]);
        left = max(left, ends[w][2]);
        right = min(right, ends[w][3]);
    }
    if (tid == 0) bounds[(i64)batch * blocks + block] = lo == hi ? make_int4(from, to, left, right) : make_int4(from, to, 0, 0);

    if (!wide) {
        if (first + tid <= last && tid < BOUND_BLOCK) labels[first + tid] = (i32)ids[(first + tid) * p.stride];
    } else {
        for (i32 row = first + warp; row <= last; row += 8) {
            const i64 x = ids[row * p.stride];
            i32 place = from;
            u32 found = 0;
            for (; place <= row; place += 32) {
                found = __ballot_sync(~0u, place + lane <= row && ids[(place + lane) * p.stride] == x);
                if (found) break;
            }
            if (lane == 0) labels[row] = place + __ffs(found) - 1;
        }
    }
    // Tiles load labels past the last position but never use them.
    if (last == p.t - 1)
        for (i32 i = p.t + tid; i < p.padded; i += 256) labels[i] = 0;
}

}  // namespace attention
