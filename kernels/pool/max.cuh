// max_pool2d of (N, C, H, W) in any layout, and its gradient: each element of the gradient of a window's maximum is shared by
// the elements that attain it.
//
// Threads: one for V neighbouring channels (16 bytes where channels lie side by side, else 1) of one position, 256 a block. Forward reads each element once for each window it is in, from the caches all but once. Backward is two
// walks: `share` divides each window's gradient by the number of its maxima, `spread` adds up, for each element of x, the shares
// of the windows whose maximum it is, in order of windows and in f32. No shared memory; limited by memory.
#pragma once
#include "device/pack.cuh"

namespace pool {

using namespace region;

struct Problem {
    // Strides along (N, C, H, W) of x, y and their gradients.
    i64 xs[4], ys[4], gs[4], ds[4];
    i32 n, c, h, w, oh, ow;
    // Of rows and columns.
    i32 kernel[2], stride[2], before[2], dilation[2];
};

struct Place {
    i32 n, c, y, x;
};

__device__ __forceinline__ void split(i64& rest, i32& digit, i32 n) {
    i64 up = rest / n;
    digit = (i32)(rest - up * n), rest = up;
}

// Thread number -> element of images of rows x cols, V channels at a time; channels fastest if LAST, else columns.
template <int V, bool LAST>
__device__ __forceinline__ bool place(Place& at, const Problem& p, i32 rows, i32 cols) {
    const i32 groups = p.c / V;
    i64 rest = (i64)blockIdx.x * 256 + threadIdx.x;
    if (rest >= (i64)p.n * rows * cols * groups) return false;
    if (LAST) split(rest, at.c, groups);
    split(rest, at.x, cols);
    split(rest, at.y, rows);
    if (!LAST) split(rest, at.c, groups);
    at.c *= V, at.n = (i32)rest;
    return true;
}

// Where a window's share lies: in the order of threads.
template <bool LAST>
__device__ __forceinline__ i64 cell(const Problem& p, i32 n, i32 c, i32 y, i32 x) {
    return LAST ? (((i64)n * p.oh + y) * p.ow + x) * p.c + c : (((i64)n * p.c + c) * p.oh + y) * p.ow + x;
}

template <class C>
__device__ __forceinline__ C lowest() {
    return -(C)__int_as_float(0x7f800000);
}

__device__ __forceinline__ i64 offset(const i64* s, i32 n, i32 c, i32 y, i32 x) { return n * s[0] + c * s[1] + y * s[2] + x * s[3]; }

// Maximum, with NaN above all.
template <class C>
__device__ __forceinline__ C larger(C a, C b) {
    return b > a || b != b ? b : a;
}

template <class T, class C, int V, bool LAST>
__device__ __forceinline__ void maximum(const T* x, T* y, const Problem& p) {
    Place at;
    if (!place<V, LAST>(at, p, p.oh, p.ow)) return;
    C top[V];
#pragma unroll
    for (int k = 0; k < V; k++) top[k] = lowest<C>();
    for (i32 i = 0; i < p.kernel[0]; i++) {
        const i32 iy = at.y * p.stride[0] - p.before[0] + i * p.dilation[0];
        if ((u32)iy >= (u32)p.h) continue;
        for (i32 j = 0; j < p.kernel[1]; j++) {
            const i32 ix = at.x * p.stride[1] - p.before[1] + j * p.dilation[1];
            if ((u32)ix >= (u32)p.w) continue;
            C v[V];
            load_pack<V, true>(v, x + offset(p.xs, at.n, at.c, iy, ix));
#pragma unroll
            for (int k = 0; k < V; k++) top[k] = larger(top[k], v[k]);
        }
    }
    store_pack<V>(y + offset(p.ys, at.n, at.c, at.y, at.x), top);
}

// What each element that attains a window's maximum gets.
template <class T, class C, int V, bool LAST>
__device__ __forceinline__ void share(const T* x, const T* y, const T* g, T* out, const Problem& p) {
    Place at;
    if (!place<V, LAST>(at, p, p.oh, p.ow)) return;
    C top[V], d[V], count[V];
    load_pack<V, true>(top, y + offset(p.ys, at.n, at.c, at.y, at.x));
    load_pack<V, true>(d, g + offset(p.gs, at.n, at.c, at.y, at.x));
#pragma unroll
    for (int k = 0; k < V; k++) count[k] = 0;
    for (i32 i = 0; i < p.kernel[0]; i++) {
        const i32 iy = at.y * p.stride[0] - p.before[0] + i * p.dilation[0];
        for (i32 j = 0; j < p.kernel[1]; j++) {
            const i32 ix = at.x * p.stride[1] - p.before[1] + j * p.dilation[1];
            const bool inside = (u32)iy < (u32)p.h && (u32)ix < (u32)p.w;
            C v[V];
            if (inside) load_pack<V, true>(v, x + offset(p.xs, at.n, at.c, iy, ix));
#pragma unroll
            for (int k = 0; k < V; k++) count[k] += (inside ? v[k] : lowest<C>()) == top[k] ? (C)1 : (C)0;
        }
    }
#pragma unroll
    for (int k = 0; k < V; k++) d[k] = d[k] / count[k];
    store_pack<V>(out + cell<LAST>(p, at.n, at.c, at.y, at.x), d);
}

template <class T, class C, int V, bool LAST>
__device__ __forceinline__ void spread(const T* x, const T* y, const T* shares, T* dx, const Problem& p) {
    Place at;
    if (!place<V, LAST>(at, p, p.h, p.w)) return;
    C v[V], sum[V];
    load_pack<V, true>(v, x + offset(p.xs, at.n, at.c, at.y, at.x));
#pragma unroll
    for (int k = 0; k < V; k++) sum[k] = 0;
    // Windows that hold this row, and of these that hold this column.
    const i32 ty = at.y + p.before[0], tx = at.x + p.before[1];
    const i32 ly = ty - (p.kernel[0] - 1) * p.dilation[0], lx = tx - (p.kernel[1] - 1) * p.dilation[1];
    i32 first = lx > 0 ? (lx + p.stride[1] - 1) / p.stride[1] : 0;
    for (i32 i = ly > 0 ? (ly + p.stride[0] - 1) / p.stride[0] : 0; i < p.oh && i * p.stride[0] <= ty; i++) {
        if ((ty - i * p.stride[0]) % p.dilation[0]) continue;
        for (i32 j = first; j < p.ow && j * p.stride[1] <= tx; j++) {
            if ((tx - j * p.stride[1]) % p.dilation[1]) continue;
            C top[V], d[V];
            load_pack<V, true>(top, y + offset(p.ys, at.n, at.c, i, j));
            load_pack<V, true>(d, shares + cell<LAST>(p, at.n, at.c, i, j));
#pragma unroll
            for (int k = 0; k < V; k++) sum[k] += v[k] == top[k] ? d[k] : (C)0;
        }
    }
    store_pack<V>(dx + offset(p.ds, at.n, at.c, at.y, at.x), sum);
}

}  // namespace pool
