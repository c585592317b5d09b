// Computes argmax and argmin: the position of the first largest (or smallest) element of each row; NaN takes precedence
// over all values.
//
// Mapping: a unit is (chunk of a row, row), which GROUP threads read: 1 if rows are short or adjacent in memory,
// otherwise a warp or a block of 256. A row with several chunks stores partial results (key, position) of shape
// (chunks, rows), which `arg_finish` reduces, one warp per row. The result does not depend on the order of comparisons:
// the larger key wins, then the smaller position. Limited by device memory: x is read once.
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

struct Best {
    u64 key;
    u64 at;
};

__device__ __forceinline__ void keep_better(Best& a, u64 key, u64 at) {
    if (key > a.key || (key == a.key && at < a.at)) {
        a.key = key;
        a.at = at;
    }
}

// Combines the results of GROUP adjacent threads; thread 0 of the group has the result.
template <int GROUP>
__device__ __forceinline__ void reduce_best(Best& best) {
    if (GROUP == 1) return;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        u64 key = __shfl_down_sync(~0u, best.key, d);
        u64 at = __shfl_down_sync(~0u, best.at, d);
        keep_better(best, key, at);
    }
    if (GROUP > 32) {
        __shared__ Best shared[8];
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < 8; w++) keep_better(best, shared[w].key, shared[w].at);
        }
    }
}

// `strided` over rows: (x).
template <typename T, int GROUP, typename Strided>
__device__ __forceinline__ void arg_reduce(const T* __restrict__ x, i64* __restrict__ out, Best* __restrict__ partials,
                                           const Strided& strided, i64 rows, i64 n, i64 step, i64 chunks, i64 chunk, bool max) {
    typedef SortKey<T> O;
    u64 unit = global_thread<u64>() / GROUP;
    u32 lane = threadIdx.x % GROUP;
    // Whole groups exit together.
    if (unit >= (u64)(rows * chunks)) return;
    // Rows are split only if there are few.
    u64 c = chunks == 1 ? 0 : (u32)unit / (u32)rows, row = unit - c * rows;
    typename Strided::Offset at[1];
    strided.offsets((typename Strided::Index)row, at);
    const T* from = x + at[0];
    i64 end = (i64)(c + 1) * chunk < n ? (i64)(c + 1) * chunk : n;
    Best best = {0, ~0ull};
#pragma unroll 4
    for (i64 i = (i64)c * chunk + lane; i < end; i += GROUP) {
        typename O::Key key = O::key(from[i * step]);
        if (!max) {
            // NaN keeps the highest priority; the order of the other keys is reversed.
            key = O::FLOAT && key == O::LAST ? O::LAST : key ^ O::LAST;
        }
        keep_better(best, key, i);
    }
    reduce_best<GROUP>(best);
    if (lane == 0) {
        if (chunks == 1) {
            out[row] = (i64)best.at;
        } else {
            partials[c * rows + row] = best;
        }
    }
}

__device__ __forceinline__ void arg_finish(const Best* __restrict__ partials, i64* __restrict__ out, i64 rows, i64 chunks) {
    u64 row = global_thread<u64>() / 32;
    if (row >= (u64)rows) return;
    Best best = {0, ~0ull};
    for (i64 c = threadIdx.x % 32; c < chunks; c += 32) {
        Best b = partials[c * rows + row];
        keep_better(best, b.key, b.at);
    }
    reduce_best<32>(best);
    if (threadIdx.x % 32 == 0) out[row] = (i64)best.at;
}

}  // namespace library
