// Computes the offsets of several strided operands from an element's row-major index.
//
// `Strided32` is for calls whose counts and offsets are all below 2^31, and divides by multiplication. `Strided64` is
// for all others. The host merges dims where all operands allow it (runtime/cuda/src/library/strided.rs), so ranks are
// small. Both are passed by value.
#pragma once
#include "device/base.cuh"
#include "device/fault.cuh"

namespace library {

// Division of p < 2^31 after Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
template <int R, int N>
struct alignas(8) Strided32 {
    typedef u32 Index;
    typedef i32 Offset;
    u32 size[R], magic[R], shift[R];
    i32 stride[N][R];

    __device__ __forceinline__ void offsets(u32 p, i32 (&at)[N]) const {
#pragma unroll
        for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll
        for (int d = R - 1; d > 0; d--) {
            u32 q = (__umulhi(p, magic[d]) + p) >> shift[d];
            i32 r = (i32)(p - q * size[d]);
#pragma unroll
            for (int k = 0; k < N; k++) at[k] += r * stride[k][d];
            p = q;
        }
#pragma unroll
        for (int k = 0; k < N; k++) at[k] += (i32)p * stride[k][0];
    }
};

template <int R, int N>
struct alignas(8) Strided64 {
    typedef u64 Index;
    typedef i64 Offset;
    u64 size[R];
    i64 stride[N][R];

    __device__ __forceinline__ void offsets(u64 p, i64 (&at)[N]) const {
#pragma unroll
        for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll
        for (int d = R - 1; d > 0; d--) {
            u64 q = p / size[d];
            i64 r = (i64)(p - q * size[d]);
#pragma unroll
            for (int k = 0; k < N; k++) at[k] += r * stride[k][d];
            p = q;
        }
#pragma unroll
        for (int k = 0; k < N; k++) at[k] += (i64)p * stride[k][0];
    }
};

// The number of this thread in the grid.
template <typename Index>
__device__ __forceinline__ Index global_thread() {
    return (Index)blockIdx.x * blockDim.x + threadIdx.x;
}

// V elements moved at once: at most 16 bytes, aligned to their size.
template <typename T, int V>
struct alignas(sizeof(T) * V) Vec {
    T at[V];
};

template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_vec(const T* p) {
    return *reinterpret_cast<const Vec<T, V>*>(p);
}

template <typename T, int V>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, V>& x) {
    *reinterpret_cast<Vec<T, V>*>(p) = x;
}

}  // namespace library
