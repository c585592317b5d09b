// Joins the pieces of the devices along an axis.
//
// Shapes: `spans`: the result is one span of bytes from each device, `step` bytes apart. `rows`: the result has rows of one block from
// each device; a block has `block` words, a piece `words` in all.
// Mapping: 256 threads a block, grid-stride over the words (up to 16 bytes) of a piece; blockIdx.y is the piece. Each device starts
// with its own piece, so that the links to different devices are used at the same time. No shared memory. Limited by the memory of this
// GPU and, for pieces of other GPUs, by the links between them.
#pragma once
#include "collective/pieces.cuh"

namespace collective {

// The piece that this block of threads copies, if the device has coordinate `own`.
__device__ __forceinline__ i32 turn(i64 ranks, i64 own) {
    const i32 k = (i32)blockIdx.y + (i32)own;
    return k < (i32)ranks ? k : k - (i32)ranks;
}

// Copies n words; the loads of a thread's next 4 words are issued before they are stored.
template <typename W, typename I, typename Load, typename Store>
__device__ __forceinline__ void copy(I n, Load load, Store store) {
    const I step = threads<I>();
    for (I first = thread<I>(); first < n; first += 4 * step) {
        W x[4];
#pragma unroll
        for (i32 k = 0; k < 4; k++) {
            if (first + k * step < n) x[k] = load(first + k * step);
        }
#pragma unroll
        for (i32 k = 0; k < 4; k++) {
            if (first + k * step < n) store(first + k * step, x[k]);
        }
    }
}

// Copies `total` bytes. OTHERS: the span of this device is in place already.
template <typename W, bool OTHERS>
__device__ __forceinline__ void spans(const Pieces& pieces, u8* out, i64 ranks, i64 own, i64 total, i64 step) {
    const i32 k = turn(ranks, own);
    const i64 begin = k * step;
    if ((OTHERS && k == own) || begin >= total) return;
    const i64 bytes = total - begin < step ? total - begin : step;
    const u8* from = (const u8*)pieces.at[k];
    u8* to = out + begin;
    const i64 words = bytes / (i64)sizeof(W);
    copy<W, i64>(words, [=](i64 i) { return ((const W*)from)[i]; }, [=](i64 i, W x) { ((W*)to)[i] = x; });
    const i64 i = words * (i64)sizeof(W) + thread<i64>();
    if (i < bytes) to[i] = from[i];
}

template <typename W, typename I>
__device__ __forceinline__ void rows(const Pieces& pieces, W* out, i64 ranks, i64 own, i64 words, i64 block) {
    const i32 k = turn(ranks, own);
    const W* from = (const W*)pieces.at[k];
    copy<W, I>((I)words, [=](I i) { return from[i]; }, [=](I i, W x) {
        const I row = i / (I)block;
        out[((u64)row * (u64)ranks + k) * (u64)block + (i - row * (I)block)] = x;
    });
}

}  // namespace collective
