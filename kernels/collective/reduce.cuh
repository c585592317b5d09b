// Combines the pieces of the devices along an axis: out[i] = p0[j] + p1[j] + ..., or their maximum or minimum, in the order of their
// coordinates, or their sum in a binary tree over the coordinates. Sums of 16-bit floats are computed in f32 and rounded once, or given in
// f32 (Widened). Every device computes the same bits, which are those of runtime/cpu/src/library/collective.rs.
//
// Shapes: n elements of the result. With ROWS, the result is rows of `len` vectors, which start `row` vectors apart in a piece;
// otherwise j = i.
// Mapping: 256 threads a block, grid-stride; a thread combines vectors of V elements, up to 16 bytes of a piece, and has the loads of FLIGHT pieces
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
    typedef T Result;
    static constexpr i32 FLIGHT = 8;
    static __device__ __forceinline__ State first(T x) { return library::Numeric<T>::widen(x); }
    static __device__ __forceinline__ State next(State s, T x) { return s + library::Numeric<T>::widen(x); }
    static __device__ __forceinline__ T last(State s) { return library::Numeric<T>::narrow(s); }
};

// A sum of 16-bit floats that is not rounded.
template <typename T>
struct Widened : Sum<T> {
    typedef typename Sum<T>::State Result;
    static __device__ __forceinline__ Result last(Result s) { return s; }
};

// The larger, or NaN if either is NaN; of equal ones (+0 and -0) the later. The bits of an element are kept.
template <typename T>
struct Max {
    typedef T State;
    typedef T Result;
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
    typedef T Result;
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
    typedef T Result;
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

// V elements, in words of up to 16 bytes.
template <typename T, i32 V>
union Vector {
    static constexpr i32 BYTES = V * sizeof(T) < 16 ? V * sizeof(T) : 16;
    static constexpr i32 WORDS = V * sizeof(T) / BYTES;
    typedef typename Word<BYTES>::Type W;
    W word[WORDS];
    T element[V];
};

// Combines vector `at` of every piece to vector `to` of the result.
template <typename T, typename Op, i32 V>
__device__ __forceinline__ void combine(const Pieces& pieces, typename Op::Result* out, i32 ranks, u64 at, u64 to) {
    typedef typename Vector<T, V>::W W;
    typedef Vector<typename Op::Result, V> Out;
    constexpr i32 FLIGHT = Op::FLIGHT;
    typename Op::State sum[V];
    for (i32 base = 0; base < ranks; base += FLIGHT) {
        Vector<T, V> x[FLIGHT];
#pragma unroll
        for (i32 k = 0; k < FLIGHT; k++) {
            if (base + k < ranks) x[k].word[0] = ((const W*)pieces.at[base + k])[at];
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
    Out result;
#pragma unroll
    for (i32 v = 0; v < V; v++) result.element[v] = Op::last(sum[v]);
#pragma unroll
    for (i32 w = 0; w < Out::WORDS; w++) ((typename Out::W*)out)[to * Out::WORDS + w] = result.word[w];
}

template <typename T, typename Op, i32 V, typename I, bool ROWS>
__device__ __forceinline__ void reduce(const Pieces& pieces, typename Op::Result* out, i64 ranks, i64 n, i64 len, i64 row) {
    const I vectors = (I)n / V;
    for (I i = thread<I>(); i < vectors; i += threads<I>()) {
        const u64 at = ROWS ? (u64)(i / (I)len) * (u64)row + i % (I)len : (u64)i;
        combine<T, Op, V>(pieces, out, (i32)ranks, at, (u64)i);
    }
    if constexpr (V > 1 && !ROWS) {
        const I i = vectors * V + thread<I>();
        if (i < (I)n) combine<T, Op, 1>(pieces, out, (i32)ranks, (u64)i, (u64)i);
    }
}

}  // namespace collective
