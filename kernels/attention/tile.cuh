// Defines attention's parameters and its two matrix products over tiles in shared memory, with mma.sync.
//
// Letters: C is the head size that a kernel is compiled for (the tensors' D and E are at most C; columns past them read
// as 0), B batch, H query heads, G key heads, r = H / G, T queries, S keys.
#pragma once
#include "device/tile.cuh"

namespace attention {

using namespace tensor;

constexpr f32 LOG2E = 1.4426950408889634f;
__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }

// Strides in elements. The last dim of a tensor is contiguous; all strides and the first element are multiples of 16
// bytes, so every row can be copied 16 bytes at a time.
struct Strides {
    i64 batch, head, row;
};

// The parameters of all kernels.
struct Problem {
    Strides q, k, v, out, grad, dq, dk, dv;
    i32 t, s;        // queries, keys
    i32 d, e;        // head sizes of q and k, and of v
    i32 heads;       // H
    i32 groups;      // G
    i32 group;       // r
    i32 window;      // number of keys that a query attends to, including itself
    i32 pairs;       // B H, or B G for dk and dv
    i32 section;     // pairs whose tiles are processed together
    f32 scale;
    i32 padded;      // rows of `stats` per head (sm_90a), T rounded up
};

// The (batch, head) and the tile of it that a block processes. Blocks start in order of their index. A section's keys
// and values fit in the L2 cache; within a section, the blocks of one tile index are adjacent, so that the longest
// tiles of a causal mask all go first.
struct TileIndex {
    i32 pair, tile;
    __device__ __forceinline__ TileIndex(const Problem& p, i32 tiles) {
        i32 block = (i32)read_ctaid(), whole = p.section * tiles;
        i32 first = block / whole;
        i32 rest = block - first * whole;
        first *= p.section;
        i32 n = min(p.section, p.pairs - first);
        tile = rest / n;
        pair = first + (rest - tile * n);
    }
};

// The left operand of `scores`: a warp's 16 MT rows of a tile, read from shared memory at each use ...
template <typename TILE, int MT>
struct SharedOperand {
    u32 at;
    __device__ __forceinline__ SharedOperand(u32 tile, int row, u32 lane) : at(tile + TILE::lane_down(lane) + row * TILE::PITCH) {}
    __device__ __forceinline__ void fetch() {}
    __device__ __forceinline__ void get(u32 (&a)[4], int m, int k) const { ldmatrix(a, TILE::block(at, m * 16, k * 2)); }
};

// ... or kept in registers after the first `fetch`.
template <typename TILE, int MT>
struct RegisterOperand {
    static constexpr int K = TILE::CHUNKS / 2;
    u32 at;
    u32 a[MT][K][4];
    __device__ __forceinline__ RegisterOperand(u32 tile, int row, u32 lane) : at(tile + TILE::lane_down(lane) + row * TILE::PITCH) {}
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int k = 0; k < K; k++) ldmatrix(a[m][k], TILE::block(at, m * 16, k * 2));
    }
    __device__ __forceinline__ void get(u32 (&to)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = a[m][k][i];
    }
};

template <bool IN_REGISTERS, typename TILE, int MT>
struct LeftOperand {
    using Type = SharedOperand<TILE, MT>;
};
template <typename TILE, int MT>
struct LeftOperand<true, TILE, MT> {
    using Type = RegisterOperand<TILE, MT>;
};

// c = A B^T: A has 16 MT rows, B the N rows of a tile, both with C columns. `b` is the lane's offset (lane_along) in B.
template <typename T, typename TILE, int MT, int N, typename A>
__device__ __forceinline__ void scores(f32 (&c)[MT][N / 8][4], const A& left, u32 b) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][j][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < TILE::CHUNKS / 2; k++) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) left.get(a[m], m, k);
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            u32 x[4];
            ldmatrix(x, TILE::block(b, j * 16, k * 2));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                Half<T>::mma(c[m][2 * j], a[m], x[0], x[1]);
                Half<T>::mma(c[m][2 * j + 1], a[m], x[2], x[3]);
            }
        }
    }
}

// c += P B: P are the packed weights of 16 MT rows over the K rows of a tile, B its N columns starting at `column`. `b`
// is the lane's offset (lane_down) in B.
template <typename T, typename TILE, int MT, int K, int N>
__device__ __forceinline__ void weighted(f32 (&c)[MT][N / 8][4], const u32 (&p)[MT][K / 16][4], u32 b, int column) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            u32 x[4];
            ldmatrix_t(x, TILE::block(b, k * 16, column / 8 + j * 2));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                Half<T>::mma(c[m][2 * j], p[m][k], x[0], x[1]);
                Half<T>::mma(c[m][2 * j + 1], p[m][k], x[2], x[3]);
            }
        }
}

// Packs accumulators as the left operand of the next product.
template <typename T, int MT, int N>
__device__ __forceinline__ void pack(u32 (&p)[MT][N / 16][4], const f32 (&c)[MT][N / 8][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int k = 0; k < N / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const f32* from = c[m][2 * k + i / 2] + (i & 1) * 2;
                p[m][k][i] = Half<T>::pack(from[0], from[1]);
            }
}

// Sets the scores of keys that a query may not attend to to -inf. `row` and `key` are the warp's first.
template <bool CAUSAL, bool WINDOW, int MT, int N>
__device__ __forceinline__ void apply_mask(f32 (&x)[MT][N / 8][4], i32 row, i32 key, i32 s, i32 window) {
    const i32 tid = read_tid();
    row += tid % 32 / 4;
    key += tid % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i32 r = row + m * 16 + i / 2 * 8, c = key + j * 8 + (i & 1);
                bool seen = c < s && (!CAUSAL || c <= r) && (!WINDOW || c > r - window);
                x[m][j][i] = seen ? x[m][j][i] : -infinity();
            }
}

}  // namespace attention
