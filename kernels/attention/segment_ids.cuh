// Masks attention by segment ids (packed documents): in addition to the other masks, query i attends to key j only if
// both positions have the same id.
//
// `segment_bounds` reads the ids once and writes what the attention kernels read: `labels`, the ids in 32 bits, and for
// each BOUND_BLOCK rows the range of columns visible to them. Ids may come in any order. Columns outside the bounds are
// never loaded; within them, only tiles whose labels may differ are compared label by label. Non-decreasing ids, as
// packed documents have, give tight bounds.
//
// Rows are queries and columns keys, or in the kernels of dk and dv the other way round. Attention to all keys has the same
// positions on both sides, so one computation serves both. A block of keys (`key_block.cuh`) has positions of its own.
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
    __device__ __forceinline__ NoSegmentIds of(i32, i32) const { return {}; }
};

// Labels per batch: a tile reads beyond the last of `n` positions.
__host__ __device__ constexpr i32 label_pitch(i32 n) { return (n + 127) / 128 * 128 + 128; }

// ... and of one with documents.
struct SegmentIds {
    static constexpr bool ON = true;
    const i32 *rows, *columns;  // labels: (B, label_pitch of the positions)
    const int4* bounds;         // (B, rows / BOUND_BLOCK rounded up): first and last + 1 visible column, then the same for columns visible to all
    i32 row_pitch, column_pitch;

    // Queries and keys at the same positions.
    static __device__ __forceinline__ SegmentIds whole(const i32* labels, const int4* bounds, const Problem& p) {
        return {labels, labels, bounds, p.padded, p.padded};
    }
    // Queries and a block of keys. `KEYS`: rows are keys.
    template <bool KEYS>
    static __device__ __forceinline__ SegmentIds block(const i32* rows, const i32* columns, const int4* bounds, const Problem& p) {
        return {rows, columns, bounds, label_pitch(KEYS ? p.s : p.t), label_pitch(KEYS ? p.t : p.s)};
    }
    // The segment ids of one batch of `n` rows.
    __device__ __forceinline__ SegmentIds of(i32 batch, i32 n) const {
        return {rows + batch * row_pitch, columns + batch * column_pitch,
                bounds + batch * ((n + BOUND_BLOCK - 1) / BOUND_BLOCK), row_pitch, column_pitch};
    }
    // The columns visible to the ROWS rows starting at `first`, a multiple of ROWS: from the bounds of whole blocks, or of
    // the block that contains the rows.
    template <int ROWS>
    __device__ __forceinline__ int2 span(i32 first, i32 n) const {
        static_assert(ROWS % BOUND_BLOCK == 0 || BOUND_BLOCK % ROWS == 0);
        int2 y = make_int2(1 << 30, 0);
#pragma unroll
        for (int i = 0; i < ROWS; i += BOUND_BLOCK)
            if (first + i < n) {
                int4 one = bounds[(first + i) / BOUND_BLOCK];
                y.x = min(y.x, one.x);
                y.y = max(y.y, one.y);
            }
        return y;
    }
    // The bounds of the block that contains `row`; empty past the end.
    __device__ __forceinline__ int4 at(i32 row, i32 n) const {
        return row < n ? bounds[row / BOUND_BLOCK] : make_int4(0, 0, 0, 0);
    }
    // Sets a warp's elements whose row and column belong to different documents to `by`; `row` and `column` are the
    // warp's first. Labels are reloaded for each row, because registers are scarcer here than loads that hit the cache.
    template <int MT, int N>
    __device__ __forceinline__ void apply_mask(f32 (&x)[MT][N / 8][4], i32 row, i32 column, f32 by) const {
        const i32 tid = read_tid();
        const i32 *of_rows = rows + row + tid % 32 / 4, *of_columns = columns + column + tid % 4 * 2;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 r = load_label(of_rows + m * 16 + h * 8);
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    const int2 c = load_label_pair(of_columns + j * 8);
                    x[m][j][2 * h] = c.x == r ? x[m][j][2 * h] : by;
                    x[m][j][2 * h + 1] = c.y == r ? x[m][j][2 * h + 1] : by;
                }
            }
    }
};

// ---- computing labels and bounds -----------------------------------------------------------------------------------

// Any view of the ids (leading dims, n); `dims` are the leading dims, padded in front with 1.
struct SegmentParams {
    i64 dims[7], strides[7];
    i64 stride;  // stride between positions
    i32 n, padded;

    // The ids of one batch.
    __device__ __forceinline__ const i64* of(const i64* ids, i32 batch) const {
        i64 rest = batch;
#pragma unroll
        for (int i = 6; i >= 0; i--) {
            const i64 up = rest / dims[i];
            ids += (rest - up * dims[i]) * strides[i];
            rest = up;
        }
        return ids;
    }
};

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 most(i64 a, i64 b) { return a > b ? a : b; }

// The first of the `n` positions whose id is `x`, or `n`, for a warp.
__device__ __forceinline__ i32 first_with(const i64* ids, i64 stride, i32 n, i64 x) {
    const i32 lane = threadIdx.x % 32;
    for (i32 place = 0; place < n; place += 32) {
        const u32 found = __ballot_sync(~0u, place + lane < n && ids[(place + lane) * stride] == x);
        if (found) return place + __ffs(found) - 1;
    }
    return n;
}

// A thread block of 256 threads processes one block of rows of one batch and reads all ids of rows and columns.
//
// If there are ids beyond 32 bits, the label is the first position with the same id, so that labels stay exact: of keys, or beyond
// them of queries. `KEYS`: rows are keys. For attention to all keys, whose rows are both, the columns are the same ids.
template <bool KEYS>
__device__ __forceinline__ void segment_bounds(
    const i64* ids, const i64* others, i32* labels, int4* bounds, const SegmentParams& p, const SegmentParams& q) {
    __shared__ i64 low[8], high[8];
    __shared__ i32 ends[8][3];
    const i32 blocks = (p.n + BOUND_BLOCK - 1) / BOUND_BLOCK;
    const i32 batch = blockIdx.x / blocks, block = blockIdx.x - batch * blocks;
    const i32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    ids = p.of(ids, batch);
    others = q.of(others, batch);
    labels += (i64)batch * p.padded;
    const i32 first = block * BOUND_BLOCK, last = min(first + BOUND_BLOCK, p.n) - 1;

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

    // The range from the first to the last column with an id in that range, and how many have one.
    i32 from = q.n, to = 0, count = 0;
    bool wide = false;
    for (i32 i = tid; i < q.n; i += 256) {
        const i64 x = others[i * q.stride];
        wide |= x != (i64)(i32)x;
        if (lo <= x && x <= hi) {
            from = min(from, i);
            to = i + 1;
            count++;
        }
    }
    for (i32 i = tid; i < p.n; i += 256) {
        const i64 x = ids[i * p.stride];
        wide |= x != (i64)(i32)x;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        from = min(from, __shfl_xor_sync(~0u, from, d));
        to = max(to, __shfl_xor_sync(~0u, to, d));
        count += __shfl_xor_sync(~0u, count, d);
    }
    if (lane == 0) ends[warp][0] = from, ends[warp][1] = to, ends[warp][2] = count;
    wide = __syncthreads_or(wide);
    count = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) {
        from = min(from, ends[w][0]);
        to = max(to, ends[w][1]);
        count += ends[w][2];
    }
    // Columns in between are visible to all rows if there is one id and they have it.
    const bool same = lo == hi && count == to - from;
    if (tid == 0) bounds[(i64)batch * blocks + block] = make_int4(from, to, same ? from : 0, same ? to : 0);

    if (!wide) {
        if (first + tid <= last && tid < BOUND_BLOCK) labels[first + tid] = (i32)ids[(first + tid) * p.stride];
    } else {
        for (i32 row = first + warp; row <= last; row += 8) {
            const i64 x = ids[row * p.stride];
            i32 label = first_with(KEYS ? ids : others, KEYS ? p.stride : q.stride, KEYS ? p.n : q.n, x);
            if (!KEYS && label == q.n) label += first_with(ids, p.stride, p.n, x);
            if (lane == 0) labels[row] = label;
        }
    }
    // Tiles load labels past the last position but never use them.
    if (last == p.n - 1)
        for (i32 i = p.n + tid; i < p.padded; i += 256) labels[i] = 0;
}

}  // namespace attention
