// Computes gather and index_select: out[p] = x[base(p) + index(p) * step], where base is the offset with the axis at 0.
//
// Mapping: one thread for each result element, 256 per block; `strided` yields (x with the axis at 0, index). If slices
// are contiguous, the host chooses T up to 16 bytes wide and shortens the last dim, so that a row of an embedding moves
// in 16-byte accesses. No shared memory. Limited by device memory: each result is written once, coalesced; two
// dependent loads per thread, hidden by occupancy.
#pragma once
#include "library/strided.cuh"

namespace library {

template <typename T, typename Strided>
__device__ __forceinline__ void gather(const T* __restrict__ x, const i64* __restrict__ index, T* __restrict__ out,
                                       const Strided& strided, i64 n, i64 step, i64 size, Fault* fault) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    i64 i = index[at[1]];
    T value = {};
    if ((u64)i < (u64)size) {
        value = x[at[0] + i * step];
    } else {
        report(fault, i, size);
    }
    out[p] = value;
}

// Checks the indices if the result has no elements. `strided` yields (index).
template <typename Strided>
__device__ __forceinline__ void check(const i64* __restrict__ index, const Strided& strided, i64 n, i64 size, Fault* fault) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[1];
    strided.offsets(p, at);
    i64 i = index[at[0]];
    if ((u64)i >= (u64)size) report(fault, i, size);
}

// class_ids: copies the ids. An id that is neither one of `size` classes nor `ignored` is reported and skipped.
template <typename Strided>
__device__ __forceinline__ void class_ids(const i64* __restrict__ ids, i64* __restrict__ out, const Strided& strided, i64 n,
                                          i64 size, i64 ignored, Fault* fault) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[1];
    strided.offsets(p, at);
    i64 id = ids[at[0]];
    if ((u64)id >= (u64)size && id != ignored) {
        report(fault, id, size);
        id = ignored;
    }
    out[p] = id;
}

}  // namespace library
