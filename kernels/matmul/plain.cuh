// Computes matmul and linear without tensor cores: integers, and floats that cuBLASLt does not support.
//
// a (B, M, K), b (B, K, N) through any strides -> (B, M, N). Mapping: a block of 256 threads computes a tile of 64 x
// 64, each thread 4 x 4 of it, from slices of 16 along K in shared memory (8 KiB for 4-byte sums, 16 KiB for 8-byte
// ones). Sums run in order of K: f32 for f32 and 16-bit floats, f64 for f64, integers wrap. Limited by shared-memory
// reads: 8 per 16 multiply-adds. Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra" (2008).
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

__device__ __forceinline__ f32 multiply_add(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ f64 multiply_add(f64 a, f64 b, f64 c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
__device__ __forceinline__ u64 multiply_add(u64 a, u64 b, u64 c) { return a * b + c; }

__device__ __forceinline__ f32 add(f32 a, f32 b) { return __fadd_rn(a, b); }
__device__ __forceinline__ f64 add(f64 a, f64 b) { return __dadd_rn(a, b); }
__device__ __forceinline__ u32 add(u32 a, u32 b) { return a + b; }
__device__ __forceinline__ u64 add(u64 a, u64 b) { return a + b; }

struct alignas(8) Product {
    i64 m, n, k;
    i64 a_row, a_col, b_row, b_col;
    i64 tiles_m, tiles_n;
    i64 bias_step;
};

constexpr int PLAIN_SIDE = 64;

// The sums of this thread, for rows starting at `row` and columns starting at `col`: (i, j) is row + threadIdx.x / 16 +
// 16 i and column col + threadIdx.x % 16 + 16 j.
template <typename T>
__device__ __forceinline__ void product_sums(typename Numeric<T>::Acc (&sum)[4][4], const T* __restrict__ a,
                                             const T* __restrict__ b, const Product& p, i64 row, i64 col) {
    typedef typename Numeric<T>::Acc Acc;
    constexpr int SIDE = PLAIN_SIDE, DEEP = 16;
    __shared__ Acc left[DEEP][SIDE + 1], right[DEEP][SIDE + 1];
    u32 t = threadIdx.x, y = t / 16, x = t % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = 0;
    }
    // Threads run along the dim of an operand with the smaller stride.
    bool a_along = p.a_col == 1 || p.a_row != 1, b_along = p.b_col == 1 || p.b_row != 1;
    for (i64 k = 0; k < p.k; k += DEEP) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 e = t + i * 256;
            u32 d = a_along ? e % DEEP : e / SIDE, r = a_along ? e / DEEP : e % SIDE;
            bool inside = row + r < p.m && k + d < p.k;
            left[d][r] = inside ? Numeric<T>::widen(a[(row + r) * p.a_row + (k + d) * p.a_col]) : (Acc)0;
            d = b_along ? e / SIDE : e % DEEP;
            u32 c = b_along ? e % SIDE : e / DEEP;
            inside = col + c < p.n && k + d < p.k;
            right[d][c] = inside ? Numeric<T>::widen(b[(k + d) * p.b_row + (col + c) * p.b_col]) : (Acc)0;
        }
        __syncthreads();
        // 8-byte sums: unroll less, because registers run out.
#pragma unroll(sizeof(Acc) == 8 ? 4 : DEEP)
        for (int d = 0; d < DEEP; d++) {
            Acc l[4], r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                l[i] = left[d][y + 16 * i];
                r[i] = right[d][x + 16 * i];
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] = multiply_add(l[i], r[j], sum[i][j]);
            }
        }
        __syncthreads();
    }
}

// Stores the sums; the bias of a column is added before rounding.
template <typename T>
__device__ __forceinline__ void product_store(const typename Numeric<T>::Acc (&sum)[4][4], T* __restrict__ out, const Product& p,
                                              i64 row, i64 col, const T* __restrict__ bias) {
    u32 y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            i64 r = row + y + 16 * i, c = col + x + 16 * j;
            if (r < p.m && c < p.n) {
                typename Numeric<T>::Acc all = sum[i][j];
                if (bias) all = add(all, Numeric<T>::widen(bias[c * p.bias_step]));
                out[r * p.n + c] = Numeric<T>::narrow(all);
            }
        }
    }
}

// `strided` over batches: (a, b). Block: (batch, tile of rows, tile of columns). A bias (N) is added before rounding.
template <typename T, typename Strided>
__device__ __forceinline__ void product(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ out,
                                        const Strided& strided, const Product& p, const T* __restrict__ bias = nullptr) {
    u32 rest = blockIdx.x / (u32)p.tiles_n;
    i64 col = (i64)(blockIdx.x - rest * (u32)p.tiles_n) * PLAIN_SIDE;
    u32 batch = rest / (u32)p.tiles_m;
    i64 row = (i64)(rest - batch * (u32)p.tiles_m) * PLAIN_SIDE;
    typename Strided::Offset at[2];
    strided.offsets((typename Strided::Index)batch, at);
    typename Numeric<T>::Acc sum[4][4];
    product_sums(sum, a + at[0], b + at[1], p, row, col);
    product_store(sum, out + (i64)batch * p.m * p.n, p, row, col, bias);
}

}  // namespace library
