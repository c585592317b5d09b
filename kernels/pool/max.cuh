// Computes max_pool2d of (N, C, H, W) in any layout, and its gradient: the gradient of a window's maximum is split equally among the
// elements that attain it.
//
// Mapping: one thread for V adjacent channels (16 bytes if channels are innermost, else 1) of one position, 256 per
// block. The forward pass reads each element once for each window that contains it, mostly from cache. The backward
// pass takes two launches. `share` divides each window's gradient by the number of its maxima. `spread` adds, for each
// element of x, the shares of the windows whose maximum it attains, in order of windows and in f32; it uses a product,
// so that a NaN reaches its whole window. No shared memory. Limited by device memory.
#pragma once
#include "device/vec.cuh"

namespace pool {

using namespace region;

struct Problem {
    // Strides along (N, C, H, W) of x, y and their gradients.
    i64 xs[4], ys[4], gs[4], ds[4];
    i32 n, c, h, w, oh, ow;
};

// Window parameters for rows and columns. They are compile-time constants, so that windows unroll and nothing is
// divided by them at run time.
template <int KY, int KX, int SY, int SX, int PY, int PX, int DY, int DX>
struct Window {
    static constexpr int ky = KY, kx = KX, sy = SY, sx = SX, py = PY, px = PX, dy = DY, dx = DX;
};

struct Place {
    i32 n, c, y, x;
};

template <class I>
__device__ __forceinline__ void split(I& rest, i32& digit, i32 n) {
    I up = rest / (I)n;
    digit = (i32)(rest - up * (I)n), rest = up;
}

// Maps a thread number to an element of images of rows x cols, V channels at a time; channels fastest if LAST, else
// columns.
template <class I, int V, bool LAST>
__device__ __forceinline__ bool place(Place& at, const Problem& p, i32 rows, i32 cols) {
    const i32 groups = p.c / V;
    I rest = (I)blockIdx.x * 256 + threadIdx.x;
    if (rest >= (I)p.n * rows * cols * groups) return false;
    if (LAST) split(rest, at.c, groups);
    split(rest, at.x, cols);
    split(rest, at.y, rows);
    if (!LAST) split(rest, at.c, groups);
    at.c *= V, at.n = (i32)rest;
    return true;
}

// The offset of a window's share, in thread order.
template <bool LAST>
__device__ __forceinline__ i64 cell(const Problem& p, i32 n, i32 c, i32 y, i32 x) {
    return LAST ? (((i64)n * p.oh + y) * p.ow + x) * p.c + c : (((i64)n * p.c + c) * p.oh + y) * p.ow + x;
}

template <class C>
__device__ __forceinline__ C lowest() {
    return -(C)__int_as_float(0x7f800000);
}

__device__ __forceinline__ i64 offset(const i64* s, i32 n, i32 c, i32 y, i32 x) { return n * s[0] + c * s[1] + y * s[2] + x * s[3]; }

// The maximum; NaN exceeds every value.
template <class C>
__device__ __forceinline__ C larger(C a, C b) {
    return b > a || b != b ? b : a;
}

template <class W, class I, class T, class C, int V, bool LAST>
__device__ __forceinline__ void maximum(const T* x, T* y, const Problem& p) {
    Place at;
    if (!place<I, V, LAST>(at, p, p.oh, p.ow)) return;
    C top[V];
#pragma unroll
    for (int k = 0; k < V; k++) top[k] = lowest<C>();
#pragma unroll(W::ky <= 4 ? W::ky : 1)
    for (i32 i = 0; i < W::ky; i++) {
        const i32 iy = at.y * W::sy - W::py + i * W::dy;
        if ((u32)iy >= (u32)p.h) continue;
#pragma unroll(W::kx <= 4 ? W::kx : 1)
        for (i32 j = 0; j < W::kx; j++) {
            const i32 ix = at.x * W::sx - W::px + j * W::dx;
            if ((u32)ix >= (u32)p.w) continue;
            C v[V];
            load_vec<V, true>(v, x + offset(p.xs, at.n, at.c, iy, ix));
#pragma unroll
            for (int k = 0; k < V; k++) top[k] = larger(top[k], v[k]);
        }
    }
    store_vec<V>(y + offset(p.ys, at.n, at.c, at.y, at.x), top);
}

// Computes the share of each element that attains a window's maximum.
template <class W, class I, class T, class C, int V, bool LAST>
__device__ __forceinline__ void share(const T* x, const T* y, const T* g, T* out, const Problem& p) {
    Place at;
    if (!place<I, V, LAST>(at, p, p.oh, p.ow)) return;
    C top[V], d[V], count[V];
    load_vec<V, true>(top, y + offset(p.ys, at.n, at.c, at.y, at.x));
    load_vec<V, true>(d, g + offset(p.gs, at.n, at.c, at.y, at.x));
#pragma unroll
    for (int k = 0; k < V; k++) count[k] = 0;
#pragma unroll(W::ky <= 4 ? W::ky : 1)
    for (i32 i = 0; i < W::ky; i++) {
        const i32 iy = at.y * W::sy - W::py + i * W::dy;
#pragma unroll(W::kx <= 4 ? W::kx : 1)
        for (i32 j = 0; j < W::kx; j++) {
            const i32 ix = at.x * W::sx - W::px + j * W::dx;
            const bool inside = (u32)iy < (u32)p.h && (u32)ix < (u32)p.w;
            C v[V];
            if (inside) load_vec<V, true>(v, x + offset(p.xs, at.n, at.c, iy, ix));
#pragma unroll
            for (int k = 0; k < V; k++) count[k] += (inside ? v[k] : lowest<C>()) == top[k] ? (C)1 : (C)0;
        }
    }
#pragma unroll
    for (int k = 0; k < V; k++) d[k] = d[k] / count[k];
    store_vec<V>(out + cell<LAST>(p, at.n, at.c, at.y, at.x), d);
}

template <class W, class I, class T, class C, int V, bool LAST>
__device__ __forceinline__ void spread(const T* x, const T* y, const T* shares, T* dx, const Problem& p) {
    Place at;
    if (!place<I, V, LAST>(at, p, p.h, p.w)) return;
    C v[V], sum[V];
    load_vec<V, true>(v, x + offset(p.xs, at.n, at.c, at.y, at.x));
#pragma unroll
    for (int k = 0; k < V; k++) sum[k] = 0;
    // Iterates over the windows that contain this row and then this column, in order.
    const i32 ty = at.y + W::py, tx = at.x + W::px;
    const i32 ly = ty - (W::ky - 1) * W::dy, lx = tx - (W::kx - 1) * W::dx;
    // Rounded up; a stride may be as large as an i32 can be.
    const i32 top_row = ly > 0 ? (ly - 1) / W::sy + 1 : 0, left = lx > 0 ? (lx - 1) / W::sx + 1 : 0;
    constexpr int rows = ((W::ky - 1) * W::dy) / W::sy + 1, cols = ((W::kx - 1) * W::dx) / W::sx + 1;
#pragma unroll(rows <= 4 ? rows : 1)
    for (i32 r = 0; r < rows; r++) {
        const i32 i = top_row + r;
        if (i >= p.oh || i * W::sy > ty || (ty - i * W::sy) % W::dy) continue;
#pragma unroll(cols <= 4 ? cols : 1)
        for (i32 q = 0; q < cols; q++) {
            const i32 j = left + q;
            if (j >= p.ow || j * W::sx > tx || (tx - j * W::sx) % W::dx) continue;
            C top[V], d[V];
            load_vec<V, true>(top, y + offset(p.ys, at.n, at.c, i, j));
            load_vec<V, true>(d, shares + cell<LAST>(p, at.n, at.c, i, j));
#pragma unroll
            for (int k = 0; k < V; k++) sum[k] += d[k] * (v[k] == top[k] ? (C)1 : (C)0);
        }
    }
    store_vec<V>(dx + offset(p.ds, at.n, at.c, at.y, at.x), sum);
}

}  // namespace pool
