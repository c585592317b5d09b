// Pads the channels of an image with zeros: x (N, C, H, W) through any strides -> y (N, H, W, P). cuDNN's fast kernels
// need at least 8 channels; the first convolution of a network usually has 3.
//
// Mapping: one thread per 8 channels of a pixel, 256 per block, channels fastest. No shared memory. Limited by device
// memory.
#pragma once
#include "device/base.cuh"

namespace conv {

struct Padded {
    // Strides along (N, C, H, W) of x.
    i64 strides[4];
    i32 c, h, w, groups;
    i64 numel;
};

template <class I>
__device__ __forceinline__ void pad(const u16* x, uint4* y, const Padded& p) {
    I at = (I)blockIdx.x * 256 + threadIdx.x;
    if (at >= (I)p.numel) return;
    I rest = at / (I)p.groups;
    const i32 first = (i32)(at - rest * (I)p.groups) * 8;
    I up = rest / (I)p.w;
    const i64 col = (i64)(rest - up * (I)p.w);
    rest = up / (I)p.h;
    const i64 row = (i64)(up - rest * (I)p.h);
    const u16* from = x + (i64)rest * p.strides[0] + row * p.strides[2] + col * p.strides[3];
    u32 word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const i32 c = first + 2 * k;
        const u32 low = c < p.c ? from[c * p.strides[1]] : 0, high = c + 1 < p.c ? from[(c + 1) * p.strides[1]] : 0;
        word[k] = low | high << 16;
    }
    y[at] = make_uint4(word[0], word[1], word[2], word[3]);
}

// Pads the channels of each group, and the rows of a weight, with zeros: x (group, N, C, H, W) through any strides ->
// y (group, rows, H, W, 8 packs). Mapping as above.
struct Groups {
    // Strides along (group, N, C, H, W) of x.
    i64 strides[5];
    i64 numel;
    i32 n, rows, c, h, w, packs;
};

template <class I>
__device__ __forceinline__ void pad_groups(const u16* x, uint4* y, const Groups& p) {
    const I at = (I)blockIdx.x * 256 + threadIdx.x;
    if (at >= (I)p.numel) return;
    I rest = at / (I)p.packs;
    const i32 first = (i32)(at - rest * (I)p.packs) * 8;
    I up = rest / (I)p.w;
    const i64 col = (i64)(rest - up * (I)p.w);
    rest = up / (I)p.h;
    const i64 row = (i64)(up - rest * (I)p.h);
    up = rest / (I)p.rows;
    const i64 n = (i64)(rest - up * (I)p.rows);
    const u16* from = x + (i64)up * p.strides[0] + n * p.strides[1] + row * p.strides[3] + col * p.strides[4];
    const i32 count = n < p.n ? p.c : 0;
    u32 word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const i32 c = first + 2 * k;
        const u32 low = c < count ? from[c * p.strides[2]] : 0, high = c + 1 < count ? from[(c + 1) * p.strides[2]] : 0;
        word[k] = low | high << 16;
    }
    y[at] = make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace conv
