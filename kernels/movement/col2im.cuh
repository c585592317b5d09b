// Computes col2im: adds windows (outer, windows, inner, size) back onto an axis, overlaps in order of windows.
//
// Window w holds positions w * step + s * dilation. Mapping: one thread for each result element, 256 per block. Each
// thread visits the windows that cover its element, in order, so the bits equal those of the CPU. No shared memory.
// Limited by device memory: x is read once (adjacent threads share cache lines across windows) and the result is
// written once. This is a gathering form of Caffe's col2im.
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

// `strided` over the result: (x without the axis, coordinate along the axis).
template <typename T, typename Strided>
__device__ __forceinline__ void col2im(const T* __restrict__ x, T* __restrict__ out, const Strided& strided, i64 n, i32 size,
                                         i32 step, i32 dilation, i32 windows, i64 window_step, i64 x_step) {
    typedef typename Strided::Index Index;
    Index p = global_thread<Index>();
    if (p >= (Index)n) return;
    typename Strided::Offset at[2];
    strided.offsets(p, at);
    const T* from = x + at[0];
    i64 t = at[1], low = t - (i64)(size - 1) * dilation;
    i64 w = low > 0 ? (low + step - 1) / step : 0, end = t / step + 1 < windows ? t / step + 1 : windows;
    typename Numeric<T>::Acc sum = 0;
    for (; w < end; w++) {
        i32 d = (i32)(t - w * step), s = d;
        if (dilation != 1) {
            s = d / dilation;
            if (s * dilation != d) continue;
        }
        sum += Numeric<T>::widen(from[w * window_step + s * x_step]);
    }
    out[p] = Numeric<T>::narrow(sum);
}

}  // namespace library
