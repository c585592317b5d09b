// Computes a convolution with a bias, or the input gradient of one with a bias (a transposed convolution), whose groups
// have few channels, such as a depthwise one. Sums are kept in f32 and rounded once, after the bias.
//
// x (N, in_h, in_w, in_channels), y (N, h, w, channels), both channels last; w (taps, inner, channels): `inner` channels
// of x are summed for each tap of an element of y, those of its group.
//
// Mapping: one thread for V adjacent channels of a pixel of y, 256 per block, channels fastest, so a warp reads adjacent
// weights, and adjacent channels of x or the same one. V is 8 if each group has one channel on both sides. No shared memory:
// neighbouring pixels and the weights come from the L1 cache. Limited by its loads.
#pragma once
#include "device/vec.cuh"

namespace conv {

struct Direct {
    i64 numel;
    i64 h, w, packs;
    i64 in_h, in_w, in_channels;
    // Channels that an element sums for each tap, and channels of y that share them.
    i64 inner, outer;
    i64 kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    i64 bias_stride;
};

// The coordinate in x that tap k of output coordinate `at` reads, or a negative number if there is none.
template <bool BACK>
__device__ __forceinline__ i64 source(i64 at, i64 k, i64 size, i64 stride, i64 pad, i64 dilation) {
    i64 s;
    if constexpr (BACK) {
        s = at + pad - k * dilation;
        if (stride != 1 && s >= 0) {
            const i64 q = s / stride;
            s = q * stride == s ? q : -1;
        }
    } else {
        s = at * stride - pad + k * dilation;
    }
    return s < size ? s : -1;
}

// T: bf16 or f16. I: the type of an index.
template <class T, int V, bool BACK, class I>
__device__ __forceinline__ void direct(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias, T* __restrict__ y,
                                       const Direct& p) {
    const I at = (I)blockIdx.x * 256 + threadIdx.x;
    if (at >= (I)p.numel) return;
    I rest = at / (I)p.packs;
    const i64 c = (i64)(at - rest * (I)p.packs) * V;
    I up = rest / (I)p.w;
    const i64 col = (i64)(rest - up * (I)p.w);
    rest = up / (I)p.h;
    const i64 row = (i64)(up - rest * (I)p.h);
    const i64 group = V > 1 ? c : (i64)((I)c / (I)p.outer) * p.inner;
    const T* image = x + (i64)rest * p.in_h * p.in_w * p.in_channels + group;
    const i64 channels = p.packs * V;
    f32 sum[V];
#pragma unroll
    for (int e = 0; e < V; e++) sum[e] = 0.0f;
    for (i64 i = 0; i < p.kernel_h; i++) {
        const i64 from_row = source<BACK>(row, i, p.in_h, p.stride_h, p.pad_h, p.dilation_h);
        if (from_row < 0) continue;
        for (i64 j = 0; j < p.kernel_w; j++) {
            const i64 from_col = source<BACK>(col, j, p.in_w, p.stride_w, p.pad_w, p.dilation_w);
            if (from_col < 0) continue;
            const T* pixel = image + (from_row * p.in_w + from_col) * p.in_channels;
            const T* tap = w + (i * p.kernel_w + j) * p.inner * channels + c;
            for (i64 k = 0; k < p.inner; k++) {
                f32 a[V], b[V];
                region::load_vec<V, true>(a, pixel + k);
                region::load_vec<V, true>(b, tap + k * channels);
#pragma unroll
                for (int e = 0; e < V; e++) sum[e] = __fmaf_rn(a[e], b[e], sum[e]);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < V; e++) sum[e] += to_f32(bias[(c + e) * p.bias_stride]);
    region::store_vec<V>(y + (i64)at * V, sum);
}

}  // namespace conv
