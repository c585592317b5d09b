// Computes affine_sample: bilinear interpolation of images (N, C, H, W) where a 2x3 matrix of each image maps the pixels of the result.
//
// Mapping: one thread for each pixel of the result, 256 per block, which computes the position once and loops over the
// channels. Neighbouring threads read neighbouring positions, mostly from cache. No shared memory. Limited by device
// memory: the result is written once, coalesced. Arithmetic and its order are those of runtime/cpu/src/library/affine.rs.
#pragma once
#include "device/base.cuh"

namespace library {

struct Affine {
    // Strides of x along (N, C, H, W) and of the matrices along (N, row, column).
    i64 xs[4], ms[3];
    i64 n, c, h, w, oh, ow;
    f64 fill;
};

// The value limited to [0, high]; 0 for NaN.
__device__ __forceinline__ f32 limited(f32 x, f32 high) { return fminf(fmaxf(x, 0.0f), high); }
__device__ __forceinline__ f64 limited(f64 x, f64 high) { return fmin(fmax(x, 0.0), high); }

// x of type T is read as F. EDGE: the nearest pixel continues outside of x, else `fill` does.
template <typename T, typename F, bool EDGE>
__device__ __forceinline__ void affine_sample(const T* __restrict__ x, const F* __restrict__ m, F* __restrict__ out, const Affine& p) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.n * p.oh * p.ow) return;
    const i64 column = at % p.ow, row = at / p.ow % p.oh, image = at / (p.ow * p.oh);
    const F* q = m + image * p.ms[0];
    const F u = (F)column + (F)0.5, v = (F)row + (F)0.5;
    F px = q[0] * u + q[p.ms[2]] * v + q[2 * p.ms[2]] - (F)0.5;
    F py = q[p.ms[1]] * u + q[p.ms[1] + p.ms[2]] * v + q[p.ms[1] + 2 * p.ms[2]] - (F)0.5;
    const F width = (F)p.w, height = (F)p.h, fill = (F)p.fill;
    if (EDGE) px = limited(px, width - (F)1), py = limited(py, height - (F)1);
    const F left = floor(px), top = floor(py);
    F right = left + (F)1, bottom = top + (F)1;
    if (EDGE) right = limited(right, width - (F)1), bottom = limited(bottom, height - (F)1);
    const F fx = px - left, fy = py - top, gx = (F)1 - fx, gy = (F)1 - fy;
    // Comparisons of floats: positions may be far outside, or NaN.
    const bool l = left >= (F)0 && left < width, r = right >= (F)0 && right < width;
    const bool t = top >= (F)0 && top < height, b = bottom >= (F)0 && bottom < height;
    const i64 il = l ? (i64)left * p.xs[3] : 0, ir = r ? (i64)right * p.xs[3] : 0;
    const i64 it = t ? (i64)top * p.xs[2] : 0, ib = b ? (i64)bottom * p.xs[2] : 0;
    const T* from = x + image * p.xs[0];
    F* to = out + (image * p.c * p.oh + row) * p.ow + column;
    for (i64 c = 0; c < p.c; c++) {
        const F tl = t && l ? (F)from[it + il] : fill, tr = t && r ? (F)from[it + ir] : fill;
        const F bl = b && l ? (F)from[ib + il] : fill, br = b && r ? (F)from[ib + ir] : fill;
        const F upper = tl * gx + tr * fx, lower = bl * gx + br * fx;
        *to = upper * gy + lower * fy;
        from += p.xs[1];
        to += p.oh * p.ow;
    }
}

}  // namespace library
