// Finds the rows of a tile in a grouped product, whose group ends are in device memory.
//
// ends (E): group e has the rows from ends[e-1] (0 for the first) to ends[e]. Ends that descend, are negative or exceed the rows are
// reported and then clamped to the nearest valid ones, so that nothing is accessed out of bounds.
#pragma once
#include "device/base.cuh"
#include "device/fault.cuh"

namespace library {

struct alignas(8) GroupEnds {
    i64 step;    // stride of the ends
    i32 groups;  // E
    i32 rows;    // T
};

__device__ __forceinline__ i32 end_of(const i64* ends, const GroupEnds& p, i32 group) {
    i64 end = ends[group * p.step];
    return (i32)(end < 0 ? 0 : end > p.rows ? p.rows : end);
}

// Checks all ends with the threads of one block; one block per launch does this.
__device__ __forceinline__ void check_ends(const i64* ends, const GroupEnds& p, Fault* fault) {
    for (i32 e = threadIdx.x; e < p.groups; e += blockDim.x) {
        i64 end = ends[e * p.step], before = e > 0 ? ends[(e - 1) * p.step] : 0;
        if (end < before || end < 0 || end > p.rows) report(fault, end, p.rows);
    }
}

// The rows `first` to `last` of one group. If `group` is -1, they belong to no group (they follow the last end); if it
// is -2, there are none.
struct RowRange {
    i32 group, first, last;
};

// The rows of group `group`.
__device__ __forceinline__ RowRange group_rows(const i64* ends, const GroupEnds& p, i32 group) {
    i32 first = group > 0 ? end_of(ends, p, group - 1) : 0;
    return {group, first, max(first, end_of(ends, p, group))};
}

// Finds tile number `tile` of at most ROWS rows. Every group begins a new tile, and so do the rows after the last end.
// Each warp searches separately, 32 groups at a time, with prefix sums over its lanes.
template <int ROWS>
__device__ __forceinline__ RowRange find_tile(const i64* ends, const GroupEnds& p, i32 tile) {
    constexpr u32 ALL = 0xffffffffu;
    const i32 lane = threadIdx.x & 31;
    i32 start = 0, tiles = 0;  // rows and tiles of the preceding groups
    for (i32 base = 0; base < p.groups; base += 32) {
        i32 end = max(start, base + lane < p.groups ? end_of(ends, p, base + lane) : 0);
        // The running maximum; if the ends ascend, it is the end itself.
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            i32 other = __shfl_up_sync(ALL, end, d);
            if (lane >= d) end = max(end, other);
        }
        i32 begin = __shfl_up_sync(ALL, end, 1);
        if (lane == 0) begin = start;
        const i32 own = (end - begin + ROWS - 1) / ROWS;
        i32 upto = tiles + own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            i32 other = __shfl_up_sync(ALL, upto, d);
            if (lane >= d) upto += other - tiles;
        }
        const u32 who = __ballot_sync(ALL, tile >= upto - own && tile < upto);
        if (who != 0) {
            const i32 at = __ffs(who) - 1, first = begin + (tile - (upto - own)) * ROWS;
            return {base + at, __shfl_sync(ALL, first, at), __shfl_sync(ALL, end, at)};
        }
        start = __shfl_sync(ALL, end, 31);
        tiles = __shfl_sync(ALL, upto, 31);
    }
    const i32 first = start + (tile - tiles) * ROWS;
    return {first < p.rows ? -1 : -2, first, p.rows};
}

}  // namespace library
