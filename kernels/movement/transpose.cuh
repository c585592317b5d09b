// Copies a matrix of bytes to dense memory: transposed, or gathered through any strides. fp8 products need both
// operands with K contiguous.
//
// transpose_bytes: x (rows, cols) with `stride` bytes between rows -> y (cols, rows) dense; rows, cols and stride are
// multiples of 16. A block of 256 threads takes a tile of 128 x 128: a thread reads 16 columns of 4 rows and
// transposes them in registers into 16 words of 4 rows each; the tile goes through 16 KiB of shared memory, swizzled so
// that neither side has bank conflicts. Both sides access lines of 128 bytes. Limited by device memory.
#pragma once
#include "device/base.cuh"

namespace library {

__device__ __forceinline__ void transpose_bytes(const u8* x, u8* y, i64 rows, i64 cols, i64 stride) {
    __shared__ u32 tile[128 * 32];
    const i64 wide = (cols + 127) / 128;
    const i64 top = (i64)blockIdx.x / wide * 128, left = (i64)blockIdx.x % wide * 128;
    const u32 piece = threadIdx.x % 8, quad = threadIdx.x / 8;
    uint4 in[4];
    const i64 row = top + 4 * quad, col = left + 16 * piece;
    if (row < rows && col < cols) {
#pragma unroll
        for (int i = 0; i < 4; i++) in[i] = *(const uint4*)(x + (row + i) * stride + col);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 a = (&in[0].x)[k], b = (&in[1].x)[k], c = (&in[2].x)[k], d = (&in[3].x)[k];
            // Bytes 0 and 1, 2 and 3 of two rows each, then of all four rows.
            const u32 ab0 = __byte_perm(a, b, 0x5140), cd0 = __byte_perm(c, d, 0x5140);
            const u32 ab1 = __byte_perm(a, b, 0x7362), cd1 = __byte_perm(c, d, 0x7362);
            const u32 out[4] = {__byte_perm(ab0, cd0, 0x5410), __byte_perm(ab0, cd0, 0x7632),
                                __byte_perm(ab1, cd1, 0x5410), __byte_perm(ab1, cd1, 0x7632)};
#pragma unroll
            for (int j = 0; j < 4; j++) tile[(16 * piece + 4 * k + j) * 32 + (quad ^ (4 * piece))] = out[j];
        }
    }
    __syncthreads();
    const u32 lane = threadIdx.x % 32;
    if (top + 4 * lane >= rows) return;
#pragma unroll
    for (u32 c = threadIdx.x / 32; c < 128; c += 8) {
        if (left + c >= cols) return;
        *(u32*)(y + (left + c) * rows + top + 4 * lane) = tile[c * 32 + (lane ^ (4 * (c / 16)))];
    }
}

// x (rows, cols) with these strides -> y dense, one element per thread.
template <class T>
__device__ __forceinline__ void dense(const T* x, T* y, i64 rows, i64 cols, i64 row_stride, i64 col_stride) {
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at < rows * cols) y[at] = x[at / cols * row_stride + at % cols * col_stride];
}

}  // namespace library
