// Combines the pieces of the devices along an axis: out[i] = p0[j] + p1[j] + ..., or their maximum or minimum, in the order of their
// coordinates, or their sum in a binary tree over the coordinates. Sums of 16-bit floats are computed in f32 and rounded once. Every device computes the same bits, which are those of
// runtime/cpu/src/library/collective.rs.
//
// Shapes: n elements of the result. With ROWS, the result is rows of `len` vectors, which start `row` vectors apart in a piece;
// otherwise j = i.
// Mapping: 256 threads a block, grid-stride; a thread combines vectors of V elements, up to 16 bytes, and has the loads of FLIGHT pieces
// in flight. Elements behind the last whole vector take a thread each. No shared memory. Limited by the memory of this GPU and, for pieces
// of other GPUs, by the links between them.
#pragma once
#include "collective/pieces.cuh"
#include "library/numeric_traits.cuh"

namespace collective {

// The value of an element, for comparisons.
template <typename T>
__device__ __forceinline__ T value(T x) {
    return x;
}
__device__ __forceinline__ f32 value(bf16 x) { return to_f32(x); }
__device__ __forceinline__ f32 value(f16 x) { return to_f32(x); }

template <typename T>
struct Sum {
    typedef typename library::Numeric<T>::Acc State;
    static constexpr i32 FLIGHT = 8;
    static __device__ __forceinline__ State first(T x) { return library::Numeric<T>::widen(x); }
    static __device__ __forceinline__ State next(State s, T x) { return s + library::Numeric<T>::widen(x); }
    static __device__ __forceinline__ T last(State s) { return library::Numeric<T>::narrow(s); }
};

// The larger, or NaN if either is NaN; of equal ones (+0 and -0) the later. The bits of an element are kept.
template <typename T>
struct Max {
    typedef T State;
    static constexpr i32 FLIGHT = 8;
    static __device__ __forceinline__ T first(T x) { return x; }
    static __device__ __forceinline__ T next(T s, T x) {
        return value(s) > value(x) || value(s) != value(s) ? s : x;
    }
    static __device__ __forceinline__ T last(T s) { return s; }
};

template <typename T>
struct Min {
    typedef T State;
    static constexpr i32 FLIGHT = 8;
    static __device__ __forceinline__ T first(T x) { return x; }
    static __device__ __forceinline__ T next(T s, T x) {
        return value(s) < value(x) || value(s) != value(s) ? s : x;
    }
    static __device__ __forceinline__ T last(T s) { return s; }
};

// A sum in a binary tree over the coordinates of a power of two of devices: `level[l]` holds the sum of 2^l neighbours whose partner is
// yet to come, where bit l of the number of pieces so far is set. Each sum is rounded to the dtype.
template <typename T>
struct Tree {
    typedef typename library::Numeric<T>::Acc Acc;
    static constexpr i32 LEVELS = 7;
    // 8 pieces of 64-bit elements beside the levels spill.
    static constexpr i32 FLIGHT = sizeof(T) == 8 ? 4 : 8;
    struct State {
        Acc level[LEVELS];
        u32 count;
    };
    static __device__ __forceinline__ Acc rounded(Acc x) {
        return library::Numeric<T>::widen(library::Numeric<T>::narrow(x));
    }
    static __device__ __forceinline__ State first(T x) {
        State s;
        s.level[0] = library::Numeric<T>::widen(x);
        s.count = 1;
        return s;
    }
    static __device__ __forceinline__ State next(State s, T x) {
        Acc sum = library::Numeric<T>::widen(x);
        bool open = true;
#pragma unroll
        for (i32 l = 0; l < LEVELS; l++) {
            if (!open) continue;
            if (s.count >> l & 1) {
                sum = rounded(s.level[l] + sum);
            } else {
                s.level[l] = sum;
                open = false;
            }
        }
        s.count++;
        return s;
    }
    static __device__ __forceinline__ T last(State s) {
        Acc sum = s.level[0];
#pragma unroll
        for (i32 l = 1; l < LEVELS; l++) {
            if (s.count >> l & 1) sum = s.level[l];
        }
        return library::Numeric<T>::narrow(sum);
    }
};

template <typename T, i32 V>
union Vector {
    typename Word<V * sizeof(T)>::Type word;
    T element[V];
};

// Vector `at` of every piece, combined.
template <typename T, typename Op, i32 V>
__device__ __forceinline__ typename Word<V * sizeof(T)>::Type combined(const Pieces& pieces, i32 ranks, u64 at) {
    typedef typename Word<V * sizeof(T)>::Type W;
    constexpr i32 FLIGHT = Op::FLIGHT;
    typename Op::State sum[V];
    for (i32 base = 0; base < ranks; base += FLIGHT) {
        Vector<T, V> x[FLIGHT];
#pragma unroll
        for (i32 k = 0; k < FLIGHT; k++) {
            if (base + k < ranks) x[k].word = ((const W*)pieces.at[base + k])[at];
        }
#pragma unroll
        for (i32 k = 0; k < FLIGHT; k++) {
            if (base + k >= ranks) continue;
#pragma unroll
            for (i32 v = 0; v < V; v++) {
                sum[v] = base + k == 0 ? Op::first(x[k].element[v]) : Op::next(sum[v], x[k].element[v]);
            }
        }
    }
    Vector<T, V> out;
#pragma unroll
    for (i32 v = 0; v < V; v++) out.element[v] = Op::last(sum[v]);
    return out.word;
}

template <typename T, typename Op, i32 V, typename I, bool ROWS>
__device__ __forceinline__ void reduce(const Pieces& pieces, T* out, i64 ranks, i64 n, i64 len, i64 row) {
    typedef typename Word<V * sizeof(T)>::Type W;
    const I vectors = (I)n / V;
    for (I i = thread<I>(); i < vectors; i += threads<I>()) {
        const u64 at = ROWS ? (u64)(i / (I)len) * (u64)row + i % (I)len : (u64)i;
        ((W*)out)[i] = combined<T, Op, V>(pieces, (i32)ranks, at);
    }
    if constexpr (V > 1 && !ROWS) {
        const I i = vectors * V + thread<I>();
        if (i < (I)n) ((typename Word<sizeof(T)>::Type*)out)[i] = combined<T, Op, 1>(pieces, (i32)ranks, i);
    }
}

}  // namespace collective
