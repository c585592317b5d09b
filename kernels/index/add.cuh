// Computes scatter_add and index_add: sums by key, in an order that depends only on the inputs.
//
// The result is partitioned into bins: slices along the axis for index_add, single elements for scatter_add. A bin has
// `lanes` elements. Positions of src arrive stably sorted by bin (`keys`, `order`: see sort/), so the contributions to
// a bin are a run of the sorted list, in index order. `starts[b]` is the first position of bin b.
//
// - A run of up to RUN contributions is added to x one by one in Acc, with the same bits as on the CPU.
// - Longer runs: the sorted list is partitioned into chunks of RUN positions; a chunk adds its part of a long run in
//   Acc (level 1). A chunk overlaps at most two long runs, that of its first position (slot 0) and that of its last
//   (slot 1). Runs of more than RUN chunks are reduced again by RUN, in Sum, level by level, so that one frequent token
//   is not serial. The last kernel adds a bin's partial sums to x in order.
//
// Mapping: one thread for V elements (16 bytes if slices are contiguous) of a bin or of a chunk, 256 per block. No
// shared memory. Limited by device memory: src is read once and the result written once; partial sums exist only for
// long runs. Based on the segmented sums of PyTorch's embedding_dense_backward
// (aten/src/ATen/native/cuda/Embedding.cu), with a tree of fixed shape.
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

constexpr u32 RUN_BITS = 6, RUN = 1 << RUN_BITS;

// Maps an index to a bin, for sorting. A bad index gets the bin `bins`, which does not exist. `strided` over the shape
// of the index: (index, bin with the axis at 0).
template <typename Key, typename Strided>
__device__ __forceinline__ void bin_keys(const i64* __restrict__ index, Key* __restrict__ keys, const Strided& strided, i64 n,
                                         i64 step, i64 size, i64 bins, Fault* fault) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    i64 i = index[at[0]];
    Key key = (Key)bins;
    if ((u64)i < (u64)size) {
        key = (Key)(at[1] + i * step);
    } else {
        report(fault, i, size);
    }
    keys[p] = key;
}

// starts[b] for b of 0 to `bins`: the first position whose key is not below b.
template <typename Key>
__device__ __forceinline__ void run_starts(const Key* __restrict__ keys, u32* __restrict__ starts, i64 bins, u32 n) {
    u64 b = global_thread<u64>();
    if (b > (u64)bins) return;
    u32 low = 0, high = n;
    while (low < high) {
        u32 middle = low + (high - low) / 2;
        if ((u64)keys[middle] < b) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    starts[b] = low;
}

// The offset in src of position k of the index: usually k * step.
struct alignas(8) LinearPosition {
    i64 step;
    __device__ __forceinline__ i64 operator()(u32 k) const { return (i64)k * step; }
};
template <typename Strided>
struct alignas(8) StridedPosition {
    Strided strided;
    __device__ __forceinline__ i64 operator()(u32 k) const {
        typename Strided::Offset at[1];
        strided.offsets(k, at);
        return at[0];
    }
};

// Adds the contributions `from` to `to` of the sorted list, one by one.
template <typename T, int V, typename Position>
__device__ __forceinline__ void add_run(typename Numeric<T>::Acc (&sum)[V], const T* __restrict__ src,
                                        const u32* __restrict__ order, const Position& position, u32 from, u32 to) {
    u32 k = from;
    // Four loads in flight; the additions stay in order.
    for (; k + 4 <= to; k += 4) {
        Vec<T, V> x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = load_vec<T, V>(src + position(order[k + i]));
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int v = 0; v < V; v++) sum[v] += Numeric<T>::widen(x[i].at[v]);
        }
    }
    for (; k < to; k++) {
        Vec<T, V> x = load_vec<T, V>(src + position(order[k]));
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] += Numeric<T>::widen(x.at[v]);
    }
}

// Level 1: thread (chunk, V lanes). `lane` over the lanes of a bin, V at once: (src).
template <typename T, int V, typename Key, typename Lane, typename Position>
__device__ __forceinline__ void chunk_sums(const T* __restrict__ src, const Key* __restrict__ keys,
                                           const u32* __restrict__ order, const u32* __restrict__ starts,
                                           typename Numeric<T>::Sum* __restrict__ partials, const Lane& lane,
                                           const Position& position, i64 bins, u32 n, i64 lanes) {
    // A block covers several chunks if bins are small, otherwise part of one.
    u32 columns = (u32)(lanes / V), blocks = (columns + blockDim.x - 1) / blockDim.x;
    u32 chunk, column;
    if (blocks == 1) {
        u32 chunks = blockDim.x / columns;
        chunk = threadIdx.x / columns;
        column = threadIdx.x - chunk * columns;
        if (chunk >= chunks) return;
        chunk += blockIdx.x * chunks;
    } else {
        chunk = blockIdx.x / blocks;
        column = (blockIdx.x - chunk * blocks) * blockDim.x + threadIdx.x;
        if (column >= columns) return;
    }
    u64 first = (u64)chunk << RUN_BITS;
    if (first >= n) return;
    u32 last = (u32)(first + RUN < n ? first + RUN : n) - 1;
    Key before = keys[first];
#pragma unroll 1
    for (int slot = 0; slot < 2; slot++) {
        Key key = slot ? keys[last] : before;
        if ((slot && key == before) || (u64)key >= (u64)bins) continue;
        u32 start = starts[key], end = starts[key + 1];
        if (end - start <= RUN) continue;
        typename Lane::Offset at[1];
        lane.offsets(column, at);
        typename Numeric<T>::Acc sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0;
        add_run<T, V>(sum, src + at[0], order, position, start > first ? start : (u32)first, end < last + 1 ? end : last + 1);
        typename Numeric<T>::Sum* to = partials + ((u64)chunk * 2 + slot) * lanes + (u64)column * V;
#pragma unroll
        for (int v = 0; v < V; v++) to[v] = (typename Numeric<T>::Sum)sum[v];
    }
}

// Adds, in order, the partial sums of a run [start, end) at a level whose pieces hold 2^unit positions.
template <typename Sum>
__device__ __forceinline__ Sum sum_partials(const Sum* __restrict__ partials, u32 start, u32 end, u32 unit, u32 from, u32 to,
                                    i64 lanes, u64 lane) {
    u32 low = start >> unit, high = (end - 1) >> unit;
    from = from > low ? from : low;
    to = to < high ? to : high;
    Sum sum = 0;
#pragma unroll 8
    for (u32 chunk = from; chunk <= to; chunk++) {
        // Only the first piece can hold the run in its second slot.
        u32 slot = start > chunk << unit ? 1 : 0;
        sum += partials[((u64)chunk * 2 + slot) * lanes + lane];
    }
    return sum;
}

// Level 2 and on: thread (piece of RUN pieces below, lane). A piece below holds 2^unit positions.
template <typename Sum, typename Key>
__device__ __forceinline__ void reduce_chunks(const Sum* __restrict__ below, Sum* __restrict__ above,
                                            const Key* __restrict__ keys, const u32* __restrict__ starts, i64 bins, u32 n,
                                            i64 lanes, u32 unit) {
    // Every block processes one piece.
    u32 columns = (u32)((lanes + blockDim.x - 1) / blockDim.x);
    u32 chunk = blockIdx.x / columns;
    u64 lane = (u64)(blockIdx.x - chunk * columns) * blockDim.x + threadIdx.x;
    u64 first = (u64)chunk << (unit + RUN_BITS);
    if (first >= n || lane >= (u64)lanes) return;
    u64 last = (first + ((u64)RUN << unit) < n ? first + ((u64)RUN << unit) : n) - 1;
    Key before = keys[first];
#pragma unroll 1
    for (int slot = 0; slot < 2; slot++) {
        Key key = slot ? keys[last] : before;
        if ((slot && key == before) || (u64)key >= (u64)bins) continue;
        u32 start = starts[key], end = starts[key + 1];
        if (((end - 1) >> unit) - (start >> unit) < RUN) continue;
        above[((u64)chunk * 2 + slot) * lanes + lane] =
            sum_partials(below, start, end, unit, chunk * RUN, chunk * RUN + RUN - 1, lanes, lane);
    }
}

// Thread: V elements of the result. `strided` over the result, V elements at once: (x, src with the axis at 0, bin,
// lane); `positions` of the sorted list. XV: the V elements of x are contiguous; otherwise they are `x_step` apart.
template <typename T, int V, bool XV, typename Strided, typename Position>
__device__ __forceinline__ void bin_sums(const T* __restrict__ x, const T* __restrict__ src,
                                         const u32* __restrict__ order, const u32* __restrict__ starts,
                                         const typename Numeric<T>::Sum* __restrict__ partials, T* __restrict__ out,
                                         const Strided& strided, const Position& position, i64 n, i64 x_step, i64 lanes,
                                         i64 positions) {
    typedef typename Strided::Index Index;
    typedef typename Numeric<T>::Acc Acc;
    typedef typename Numeric<T>::Sum Sum;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[4];
    strided.offsets(p, at);
    u32 start = starts[at[2]], end = starts[at[2] + 1];
    Acc sum[V];
    if (XV) {
        Vec<T, V> base = load_vec<T, V>(x + at[0]);
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = Numeric<T>::widen(base.at[v]);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = Numeric<T>::widen(x[at[0] + v * x_step]);
    }
    if (end - start <= RUN) {
        add_run<T, V>(sum, src + at[1], order, position, start, end);
    } else {
        // The lowest level at which the run has few chunks; levels are stored consecutively.
        u32 unit = RUN_BITS;
        u64 chunks = (positions + RUN - 1) / RUN;
        while (((end - 1) >> unit) - (start >> unit) >= RUN) {
            partials += chunks * 2 * lanes;
            chunks = (chunks + RUN - 1) / RUN;
            unit += RUN_BITS;
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            sum[v] = (Acc)((Sum)sum[v] + sum_partials(partials, start, end, unit, 0, ~0u, lanes, (u64)at[3] + v));
        }
    }
    Vec<T, V> result;
#pragma unroll
    for (int v = 0; v < V; v++) result.at[v] = Numeric<T>::narrow(sum[v]);
    store_vec<T, V>(out + (u64)p * V, result);
}

}  // namespace library
