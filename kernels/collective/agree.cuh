// Spreads a bad index along an axis: sets `halt` of this device if that of another one is set, so that no device writes a State.
//
// Mapping: one block with a thread for each device. Limited by latency.
#pragma once
#include "collective/pieces.cuh"
#include "device/fault.cuh"

namespace collective {

// Reports the coordinate of a device whose word is set as the index, and `axis` as the size, unless this device has reported its own.
__device__ __forceinline__ void agree(const Pieces& words, Fault* fault, i64 ranks, i64 own, i64 axis) {
    const bool mine = *(const volatile u32*)words.at[own] != 0;
    __syncthreads();
    const i64 k = threadIdx.x;
    if (!mine && k < ranks && *(const volatile u32*)words.at[k] != 0) report(fault, k, axis);
}

}  // namespace collective
