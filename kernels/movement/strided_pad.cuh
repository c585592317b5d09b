// Computes strided_pad (x at positions low + i * step along an axis, a constant elsewhere) and cat (one part of the result).
//
// Mapping: one thread for each result element, or for a vector of them, 256 per block. T is up to 16 bytes wide if
// slices are contiguous. No shared memory. Limited by device memory: the result is written once, coalesced, and x is
// read once.
#pragma once
#include "library/strided.cuh"

namespace library {

// Repeats a value over a word.
template <typename T>
__device__ __forceinline__ T splat(u64 word) {
    Vec<u64, 2> two = {{word, word}};
    return *reinterpret_cast<const T*>(&two);
}

// `strided` over the result: (x without the axis, coordinate along the axis). `fill`: the constant, repeated over a
// word.
template <typename T, typename Strided>
__device__ __forceinline__ void strided_pad(const T* __restrict__ x, T* __restrict__ out, const Strided& strided, i64 n, i64 low,
                                      i64 step, i64 count, i64 x_step, u64 fill) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    T value = splat<T>(fill);
    typename Strided::Offset d = at[1] - (typename Strided::Offset)low;
    if (d >= 0) {
        Index i = (Index)d;
        bool on = true;
        if (step != 1) {
            Index q = i / (Index)step;
            on = i == q * (Index)step;
            i = q;
        }
        if (on && i < (Index)count) value = x[at[0] + (i64)i * x_step];
    }
    out[p] = value;
}

// The same along the last dim with step 1, a vector of V result elements per thread; x need not be aligned. `strided`
// over vectors.
template <typename T, int V, typename Strided>
__device__ __forceinline__ void strided_pad_vec(const T* __restrict__ x, T* __restrict__ out, const Strided& strided, i64 n, i64 low,
                                            i64 count, u64 fill) {
    typedef typename Strided::Index Index;
    typedef typename Strided::Offset Offset;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    Offset at[2];
    strided.offsets(p, at);
    Offset first = at[1] - (Offset)low;
    const T* from = x + (at[0] + (i64)first);
    Vec<T, V> vec;
#pragma unroll
    for (int e = 0; e < V; e++) {
        bool on = first + e >= 0 && first + e < (Offset)count;
        vec.at[e] = on ? from[e] : splat<T>(fill);
    }
    store_vec<T, V>(out + (i64)p * V, vec);
}

// Copies x into a part of the result. `strided` over x: (x, out).
template <typename T, typename Strided>
__device__ __forceinline__ void copy(const T* __restrict__ x, T* __restrict__ out, const Strided& strided, i64 n) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    out[at[1]] = x[at[0]];
}

// Concatenates many small inputs that are consecutive in the output, one block per input. table: address, first
// element, count.
template <typename T>
__device__ __forceinline__ void cat_small(const u64* __restrict__ table, T* __restrict__ out) {
    const u64* part = table + 3 * (u64)blockIdx.x;
    const T* x = (const T*)part[0];
    T* to = out + part[1];
    for (u64 i = threadIdx.x; i < part[2]; i += blockDim.x) to[i] = x[i];
}

}  // namespace library
