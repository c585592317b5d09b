// Computes matmul and linear of very small matrices, for which launching cuBLASLt's kernels (about 9 us on an H200) takes longer than
// the arithmetic.
//
// a (B, M, K), b (B, K, N) through any strides -> (B, M, N); f32 and 16-bit floats. Mapping: a block of 256 threads
// computes a tile of 16 x 16, one element per thread, from slices of 64 along K in shared memory (8.5 KiB); the next
// slice is loaded while one is consumed. Sums run in order of K, in f32, by fused multiply-adds. Limited by latency: of
// the launch, of memory once per slice, and of shared memory.
#pragma once
#include "matmul/plain.cuh"

namespace library {

// Like `product`, with tiles of 16.
template <typename T, typename Strided>
__device__ __forceinline__ void product_small(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ out,
                                              const Strided& strided, const Product& p, const T* __restrict__ bias = nullptr) {
    constexpr int SIDE = 16, DEEP = 64, EACH = SIDE * DEEP / 256;
    __shared__ f32 left[DEEP][SIDE + 1], right[DEEP][SIDE + 1];
    u32 rest = blockIdx.x / (u32)p.tiles_n;
    i64 col = (i64)(blockIdx.x - rest * (u32)p.tiles_n) * SIDE;
    u32 batch = rest / (u32)p.tiles_m;
    i64 row = (i64)(rest - batch * (u32)p.tiles_m) * SIDE;
    typename Strided::Offset at[2];
    strided.offsets((typename Strided::Index)batch, at);
    a += at[0];
    b += at[1];
    u32 t = threadIdx.x, y = t / SIDE, x = t % SIDE;
    // Threads run along the dim of an operand with the smaller stride.
    bool a_along = p.a_col == 1 || p.a_row != 1, b_along = p.b_col == 1 || p.b_row != 1;
    f32 l[EACH], r[EACH];
    auto fetch = [&](i64 k) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 e = t + i * 256;
            u32 d = a_along ? e % DEEP : e / SIDE, m = a_along ? e / DEEP : e % SIDE;
            l[i] = row + m < p.m && k + d < p.k ? Numeric<T>::widen(a[(row + m) * p.a_row + (k + d) * p.a_col]) : 0.0f;
            d = b_along ? e / SIDE : e % DEEP;
            u32 n = b_along ? e % SIDE : e / DEEP;
            r[i] = col + n < p.n && k + d < p.k ? Numeric<T>::widen(b[(k + d) * p.b_row + (col + n) * p.b_col]) : 0.0f;
        }
    };
    f32 sum = 0.0f;
    fetch(0);
    for (i64 k = 0; k < p.k; k += DEEP) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 e = t + i * 256;
            if (a_along) left[e % DEEP][e / DEEP] = l[i];
            else left[e / SIDE][e % SIDE] = l[i];
            if (b_along) right[e / SIDE][e % SIDE] = r[i];
            else right[e % DEEP][e / DEEP] = r[i];
        }
        __syncthreads();
        if (k + DEEP < p.k) fetch(k + DEEP);
#pragma unroll
        for (int d = 0; d < DEEP; d++) sum = multiply_add(left[d][y], right[d][x], sum);
        __syncthreads();
    }
    if (row + y < p.m && col + x < p.n) {
        if (bias) sum = add(sum, Numeric<T>::widen(bias[(col + x) * p.bias_step]));
        out[(i64)batch * p.m * p.n + (row + y) * p.n + col + x] = Numeric<T>::narrow(sum);
    }
}

}  // namespace library
