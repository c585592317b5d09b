// Defines what differs when attention takes a block of the keys of its rows, whose results are merged with those of other
// blocks: positions of queries are shifted against those of keys, results are f32, and a row without keys has lse -inf.
//
// Liu et al., Ring Attention with Blockwise Transformers (arXiv:2310.01889). The ops are `attention_block` and its backward op.
#pragma once
#include "attention/tile.cuh"

namespace attention {

// All keys of each row: query i and key i have the same position ...
struct AllKeys {
    static constexpr bool BLOCK = false;
    static constexpr i32 shift = 0;
    template <typename T>
    using Result = T;
    // The lse of a row without keys.
    static __device__ __forceinline__ f32 empty() { return 0.0f; }
    // The exponent of 2 that weights of a row are divided by.
    static __device__ __forceinline__ f32 base(f32 lse) { return lse * LOG2E; }
};

// ... and a block of them: query i has the position i + shift, if key 0 of the block has 0.
struct KeyBlock {
    static constexpr bool BLOCK = true;
    static constexpr i32 MOST = 1 << 29;  // Sums of a shift, a position and a window fit 32 bits.
    i32 shift;
    const f32* rows;  // (B, H, T) delta, for the sm_90a kernels that compute it of whole rows
    // `at`: the shift in device memory, or null for 0.
    __device__ __forceinline__ explicit KeyBlock(const i64* at, const f32* rows = nullptr) : shift(0), rows(rows) {
        if (at) {
            const i64 x = *at;
            shift = (i32)(x < -MOST ? -MOST : x > MOST ? MOST : x);
        }
    }
    template <typename T>
    using Result = f32;
    static __device__ __forceinline__ f32 empty() { return -infinity(); }
    // A row without any keys in the whole sequence has the weights 2^-inf.
    static __device__ __forceinline__ f32 base(f32 lse) { return lse == -infinity() ? infinity() : lse * LOG2E; }
};

// Stores a warp's accumulator as Tile::store does, but in f32 and without shared memory: four lanes store 32 adjacent bytes.
template <int MT, int N>
__device__ __forceinline__ void store_f32(
    const f32 (&c)[MT][N / 8][4], f32* x, i64 stride, i32 first, i32 n, i32 width, int row, int column) {
    const i32 lane = read_tid() & 31;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i32 r = first + row + m * 16 + h * 8 + lane / 4;
            f32* const to = x + r * stride + column + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < N / 8; j++)
                if (r < n && column + j * 8 < width) *(float2*)(to + j * 8) = make_float2(c[m][j][2 * h], c[m][j][2 * h + 1]);
        }
}

// Stores a warp's accumulator in the dtype of results.
template <typename B, typename TILE, typename T, int MT, int N>
__device__ __forceinline__ void store_result(
    const f32 (&c)[MT][N / 8][4], u32 tile, typename B::template Result<T>* x, i64 stride, i32 first, i32 n, i32 width,
    int row, int column) {
    if constexpr (B::BLOCK)
        store_f32<MT, N>(c, x, stride, first, n, width, row, column);
    else
        TILE::template store<T, MT, N>(c, tile, x, stride, first, n, width, row, column);
}

}  // namespace attention
