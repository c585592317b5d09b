// Transposes matrices of 16-bit elements, such as images into channels last: x (N, C, P) with adjacent positions -> y (N, P, C)
// dense.
//
// Mapping: a block of 256 threads takes a tile of 64 channels x 64 positions of one image through shared memory. A warp
// reads 64 positions of a channel and writes 64 channels of a position: lines of 128 bytes on both sides. The eight reads
// of a thread are issued before the first store. Limited by device memory.
//
// READ_PAIRS, WRITE_PAIRS: rows of that side are aligned to 4 bytes and even.
#pragma once
#include "device/base.cuh"

namespace library {

constexpr i32 SIDE = 64;
// One word more than a row, so that reads along a column reach different banks.
constexpr i32 PITCH = SIDE + 2;

struct Planes {
    i64 image, channel;
    i64 positions;
    i32 channels;
    i32 position_tiles, channel_tiles;
};

template <bool READ_PAIRS, bool WRITE_PAIRS>
__device__ __forceinline__ void transpose_planes(const u16* x, u16* y, const Planes& p) {
    __shared__ __align__(16) u16 tile[SIDE * PITCH];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 rest = blockIdx.x / (u32)p.position_tiles;
    const i64 position = (i64)(blockIdx.x - rest * (u32)p.position_tiles) * SIDE;
    const i64 n = rest / (u32)p.channel_tiles;
    const i32 channel = (i32)(rest - (u32)n * (u32)p.channel_tiles) * SIDE;
    x += n * p.image + channel * p.channel + position;
    const i64 wide = p.positions - position;
    const i32 high = p.channels - channel;
    u32 words[8];
#pragma unroll
    for (i32 k = 0; k < 8; k++) {
        const i32 c = (i32)warp + 8 * k, s = 2 * (i32)lane;
        const u16* from = x + c * p.channel + s;
        words[k] = 0;
        if (c >= high) continue;
        if constexpr (READ_PAIRS) {
            if (s < wide) words[k] = __ldg((const u32*)from);
        } else {
            const u32 a = s < wide ? __ldg(from) : 0, b = s + 1 < wide ? __ldg(from + 1) : 0;
            words[k] = a | b << 16;
        }
    }
#pragma unroll
    for (i32 k = 0; k < 8; k++) *(u32*)(tile + ((i32)warp + 8 * k) * PITCH + 2 * (i32)lane) = words[k];
    __syncthreads();
    u16* to = y + (n * p.positions + position) * p.channels + channel;
#pragma unroll
    for (i32 k = 0; k < 8; k++) {
        const i32 s = (i32)warp + 8 * k, c = 2 * (i32)lane;
        if (s >= wide || c >= high) continue;
        const u32 a = tile[c * PITCH + s], b = tile[(c + 1) * PITCH + s];
        u16* at = to + (i64)s * p.channels + c;
        if constexpr (WRITE_PAIRS) {
            *(u32*)at = a | b << 16;
        } else {
            at[0] = (u16)a;
            if (c + 1 < high) at[1] = (u16)b;
        }
    }
}

}  // namespace library
