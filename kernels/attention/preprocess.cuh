// Prepares attention's operands: the row sums delta of the backward pass, and contiguous copies of strided operands. Limited by
// device memory.
#pragma once
#include "attention/tile.cuh"

namespace attention {

// The sum of the products of 8 adjacent elements of a row; in f32, of 4 elements if the row ends after them.
template <typename T>
__device__ __forceinline__ f32 product_of_8(const T* x, const T* y, i32) {
    const uint4 u = *(const uint4*)x, w = *(const uint4*)y;
    const u32 a[4] = {u.x, u.y, u.z, u.w}, b[4] = {w.x, w.y, w.z, w.w};
    f32 sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum += Half<T>::lo(a[i]) * Half<T>::lo(b[i]);
        sum += Half<T>::hi(a[i]) * Half<T>::hi(b[i]);
    }
    return sum;
}
template <>
__device__ __forceinline__ f32 product_of_8(const f32* x, const f32* y, i32 left) {
    f32 sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        if (i >= left) break;
        const float4 u = *(const float4*)(x + i), w = *(const float4*)(y + i);
        sum += u.x * w.x + u.y * w.y + (u.z * w.z + u.w * w.w);
    }
    return sum;
}

// delta (B, H, T) = sum over E of grad out, in f32: the term of softmax's gradient that is common to a whole row (Dao
// et al., arXiv:2205.14135, appendix B.4). LANES adjacent lanes process a row, 8 elements each; a block of 256 threads
// processes 256 / LANES rows of one (batch, head).
template <typename T, int LANES>
__device__ __forceinline__ void row_delta(const T* grad, const T* out, f32* delta, const Problem& p) {
    constexpr i32 ROWS = 256 / LANES;
    const i32 tiles = (p.t + ROWS - 1) / ROWS;
    const i32 pair = blockIdx.x / tiles, row = (blockIdx.x - pair * tiles) * ROWS + threadIdx.x / LANES;
    const i32 batch = pair / p.heads, head = pair % p.heads, chunk = threadIdx.x % LANES * 8;
    f32 sum = 0.0f;
    if (row < p.t && chunk < p.e)
        sum = product_of_8(
            grad + batch * p.grad.batch + head * p.grad.head + row * p.grad.row + chunk,
            out + batch * p.out.batch + head * p.out.head + row * p.out.row + chunk, p.e - chunk);
#pragma unroll
    for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (row < p.t && threadIdx.x % LANES == 0) delta[(i64)pair * p.t + row] = sum;
}

// (lse log2(e), delta) of one row, interleaved as the sm_90a backward kernels read them. Four adjacent lanes process
// the row, and all of them get the values. C: the head size of the kernel, at least E.
template <typename T, int C>
__device__ __forceinline__ float2 row_stats(const T* grad, const T* out, const f32* lse, i32 pair, i32 row, const Problem& p) {
    const i32 batch = pair / p.heads, head = pair % p.heads;
    grad += batch * p.grad.batch + head * p.grad.head + row * p.grad.row;
    out += batch * p.out.batch + head * p.out.head + row * p.out.row;
    f32 sum = 0.0f;
#pragma unroll
    for (int k = 0; k < C / 32; k++) {
        const i32 chunk = k * 32 + threadIdx.x % 4 * 8;
        if (row >= p.t || chunk >= p.e) continue;
        sum += product_of_8(grad + chunk, out + chunk, p.e - chunk);
    }
#pragma unroll
    for (int i = 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    return make_float2(row < p.t ? lse[(i64)pair * p.t + row] * LOG2E : 0.0f, sum);
}

// Copies any view of elements of 2 or 4 bytes (or, if x is null, one value) to contiguous memory, for the rare operand
// whose rows are not contiguous or not aligned to 16 bytes.
struct View {
    i64 dims[8], strides[8];
    i64 numel;
    i64 fill;
};

template <typename T>
__device__ __forceinline__ void copy(const T* x, T* y, const View& p) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= p.numel) return;
    T value = (T)p.fill;
    if (x) {
        i64 from = 0, rest = at;
#pragma unroll
        for (int i = 7; i >= 0; i--) {
            i64 up = rest / p.dims[i];
            from += (rest - up * p.dims[i]) * p.strides[i];
            rest = up;
        }
        value = x[from];
    }
    y[at] = value;
}

}  // namespace attention
