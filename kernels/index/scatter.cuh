// Computes scatter: x with elements replaced by those of src; of several writes to one element, the last in index order
// wins.
//
// Three launches over a table with one integer for each element of the result: `clear` zeroes it, `claim` stores in
// each entry the largest position (plus 1) that writes there, by atomicMax, whose result does not depend on the order;
// `pick` then writes every element once. Mapping: one thread per element, 256 per block. No shared memory. Limited by
// device memory, and by atomics if many writes collide.
#pragma once
#include "library/strided.cuh"

namespace library {

template <typename Word>
__device__ __forceinline__ void clear(Word* __restrict__ table, i64 n) {
    u64 p = global_thread<u64>();
    if (p < (u64)n) table[p] = 0;
}

// `strided` over the shape of the index: (index, position with the axis at 0).
template <typename Strided>
__device__ __forceinline__ void claim(const i64* __restrict__ index, typename Strided::Index* __restrict__ table,
                                      const Strided& strided, i64 n, i64 step, i64 size, Fault* fault) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    i64 i = index[at[0]];
    if ((u64)i < (u64)size) {
        atomicMax(&table[at[1] + i * step], p + 1);
    } else {
        report(fault, i, size);
    }
}

// `to` over the shape of the result: (x); `from` over the shape of the index: (src).
template <typename T, typename To, typename From>
__device__ __forceinline__ void pick(const T* __restrict__ x, const T* __restrict__ src,
                                     const typename To::Index* __restrict__ table, T* __restrict__ out, const To& to,
                                     const From& from, i64 n) {
    typedef typename To::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    Index winner = table[p];
    if (winner) {
        typename From::Offset at[1];
        from.offsets(winner - 1, at);
        out[p] = src[at[0]];
    } else {
        typename To::Offset at[1];
        to.offsets(p, at);
        out[p] = x[at[0]];
    }
}

}  // namespace library
