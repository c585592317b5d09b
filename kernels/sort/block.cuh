// Sorts short rows in shared memory: P = the next power of two, at most 2048.
//
// Mapping: a block of 256 threads sorts max(1, 2 * 256 / P) rows at once by a bitonic network on (key, position) pairs:
// positions break ties, which makes the sort stable. Rows are padded with the largest pair. Shared memory: 8 bytes per
// pair (12 for 64-bit elements), at most 24 KiB. Limited by shared memory and barriers (66 steps at P = 2048). Batcher,
// "Sorting networks and their applications" (1968).
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

template <typename Key>
__device__ __forceinline__ bool pair_after(Key a, u32 i, Key b, u32 j) {
    return a > b || (a == b && i > j);
}

// Sorts shared memory in runs of P; L pairs in all, a multiple of P and of 2.
template <int P, int L, typename Key>
__device__ __forceinline__ void bitonic(Key* keys, u32* at) {
#pragma unroll 1
    for (u32 size = 2; size <= P; size *= 2) {
#pragma unroll 1
        for (u32 step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (u32 t = threadIdx.x; t < L / 2; t += 256) {
                u32 i = 2 * t - (t & (step - 1)), j = i + step;
                // In the last stage every run is sorted upwards.
                bool down = size < P && (i & size);
                Key a = keys[i], b = keys[j];
                u32 p = at[i], q = at[j];
                if (pair_after(a, p, b, q) != down) {
                    keys[i] = b;
                    keys[j] = a;
                    at[i] = q;
                    at[j] = p;
                }
            }
        }
    }
    __syncthreads();
}

// argsort: `strided` over rows: (x); out of shape (outer, n, inner). `flip`: all bits of a key if descending, else 0.
template <typename T, int P, typename Strided>
__device__ __forceinline__ void sort_rows(const T* __restrict__ x, i64* __restrict__ out, const Strided& strided, i64 rows, i64 n,
                                          i64 step, i64 inner, bool descending) {
    typedef typename SortKey<T>::Key Key;
    constexpr int L = P < 512 ? 512 : P;
    __shared__ Key keys[L];
    __shared__ u32 at[L];
    u64 first = (u64)blockIdx.x * (L / P);
    // Rows that are adjacent in memory are loaded together; adjacent elements are in a column of the rows in shared
    // memory.
    for (u32 t = threadIdx.x; t < L; t += 256) {
        u32 row, i;
        if (inner > 1) {
            row = t % (L / P);
            i = t / (L / P);
        } else {
            row = t / P;
            i = t % P;
        }
        Key key = SortKey<T>::LAST;
        if (i < n && first + row < (u64)rows) {
            typename Strided::Offset o[1];
            strided.offsets((typename Strided::Index)(first + row), o);
            key = SortKey<T>::key(x[o[0] + i * step]);
            if (descending) key = key ^ SortKey<T>::LAST;
        }
        keys[row * P + i] = key;
        at[row * P + i] = i;
    }
    bitonic<P, L>(keys, at);
    for (u32 t = threadIdx.x; t < L; t += 256) {
        u32 row, i;
        if (inner > 1) {
            row = t % (L / P);
            i = t / (L / P);
        } else {
            row = t / P;
            i = t % P;
        }
        u64 r = first + row;
        if (i < n && r < (u64)rows) {
            u64 o = (typename Strided::Index)r / (typename Strided::Index)inner;
            out[(o * n + i) * inner + (r - o * inner)] = at[row * P + i];
        }
    }
}

// Sorts one short list of keys; stores keys and positions in order.
template <typename Key, int P>
__device__ __forceinline__ void sort_list(const Key* __restrict__ from, Key* __restrict__ keys_out, u32* __restrict__ order,
                                          u32 n) {
    __shared__ Key keys[P];
    __shared__ u32 at[P];
    for (u32 i = threadIdx.x; i < P; i += 256) {
        keys[i] = i < n ? from[i] : (Key)~(Key)0;
        at[i] = i;
    }
    bitonic<P, P>(keys, at);
    for (u32 i = threadIdx.x; i < n; i += 256) {
        keys_out[i] = keys[i];
        order[i] = at[i];
    }
}

}  // namespace library
