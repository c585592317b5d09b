// Defines how kernels of collectives address the memory of the devices along an axis.
//
// The host orders these kernels by events (runtime/cuda/src/executable/mesh.rs): a piece is complete before a kernel reads it and
// is not overwritten before the kernel has ended, so no kernel waits for another.
#pragma once
#include "device/base.cuh"

namespace collective {

constexpr i32 MOST = 64;
constexpr i32 BLOCK = 256;

// The address of the piece of each device, in the order of their coordinates: memory of this GPU, or of others by peer access.
struct Pieces {
    u64 at[MOST];
};

template <i32 BYTES>
struct Word;
template <>
struct Word<16> {
    typedef uint4 Type;
};
template <>
struct Word<8> {
    typedef uint2 Type;
};
template <>
struct Word<4> {
    typedef u32 Type;
};
template <>
struct Word<2> {
    typedef u16 Type;
};
template <>
struct Word<1> {
    typedef u8 Type;
};

template <typename I>
__device__ __forceinline__ I thread() {
    return (I)blockIdx.x * BLOCK + threadIdx.x;
}

template <typename I>
__device__ __forceinline__ I threads() {
    return (I)gridDim.x * BLOCK;
}

}  // namespace collective
