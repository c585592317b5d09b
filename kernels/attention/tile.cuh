// Tiles of rows in shared memory, and the two products over them.
//
// Letters: C the head size that a kernel is made for (the tensors' own D and E are at most that; the columns behind them
// read as 0), B batch, H query heads, G key heads, r = H / G, T queries, S keys.
#pragma once
#include "attention/mma.cuh"

namespace attention {

constexpr f32 LOG2E = 1.4426950408889634f;
__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }

// In elements. The last dim of a tensor is contiguous; all strides and the first element are multiples of 16 bytes, so that
// every row can be copied 16 bytes at a time.
struct Strides {
    i64 batch, head, row;
};

// What all kernels are told.
struct Problem {
    Strides q, k, v, out, grad, dq, dk, dv;
    i32 t, s;        // queries, keys
    i32 d, e;        // head sizes of q and k, and of v
    i32 heads;       // H
    i32 groups;      // G
    i32 group;       // r
    i32 window;      // a query sees this many keys, itself included
    i32 pairs;       // B H, or B G for dk and dv
    i32 section;     // pairs whose tiles are worked on together
    f32 scale;
    i32 padded;      // rows of `numbers` a head has (sm_90a), T rounded up
};

// Which (batch, head) and which tile of it a block works on. Blocks start in order of their index. A section's keys and
// values fit in the L2 cache; within it the blocks of one tile index go together, so that the longest tiles of a causal
// mask can all go first.
struct Place {
    i32 pair, tile;
    __device__ __forceinline__ Place(const Problem& p, i32 tiles) {
        i32 block = (i32)block_now(), whole = p.section * tiles;
        i32 first = block / whole;
        i32 rest = block - first * whole;
        first *= p.section;
        i32 n = min(p.section, p.pairs - first);
        tile = rest / n;
        pair = first + (rest - tile * n);
    }
};

extern __shared__ __align__(1024) unsigned char shared_memory[];

// ROWS rows of C elements, in panels of 64 columns (of 32 where C is no multiple of 64), each a dense ROWS x panel block.
// Within a panel the 16-byte chunk c of row i lies at chunk c ^ i (c ^ i/2), so that the 8 rows that a phase of ldmatrix
// reads fall on all 32 banks.
template <int C, int ROWS>
struct Tile {
    static_assert(C % 32 == 0 && ROWS % 16 == 0);
    static constexpr int CHUNKS = C / 8;
    static constexpr int PANEL = C % 64 == 0 ? 8 : 4;  // chunks
    static constexpr int PITCH = PANEL * 16;           // bytes
    static constexpr int BYTES = C * ROWS * 2;

    static __device__ __forceinline__ u32 swizzle(u32 row) { return PANEL == 8 ? row & 7 : (row >> 1) & 3; }
    static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
        return (chunk / PANEL * ROWS + row) * PITCH + ((chunk % PANEL ^ swizzle(row)) * 16);
    }
    // Where a lane points ldmatrix in the tile's first 16 x 16 block: `down` its 8 x 8 matrices go down the rows first,
    // as A wants them (and B of a transposed tile); else along the columns.
    static __device__ __forceinline__ u32 lane_down(u32 lane) { return offset(lane & 15, lane >> 4); }
    static __device__ __forceinline__ u32 lane_along(u32 lane) {
        return offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    }
    // The same lane's place in the block at (row, chunk): multiples of 16 and 2, known to the compiler. The tile starts
    // at a multiple of 1024, so the swizzle is an exclusive or of the address itself.
    static __device__ __forceinline__ u32 block(u32 at, int row, int chunk) {
        return (at ^ (chunk % PANEL * 16)) + (chunk / PANEL * ROWS + row) * PITCH;
    }

    // The same place `column` columns on, a multiple of a panel that the compiler does not know.
    static __device__ __forceinline__ u32 shift(u32 at, int column) {
        return at + column / (PANEL * 8) * (ROWS * PITCH);
    }

    // Rows `first` on of a tensor: `n` is its number of rows, `width` of columns; what lies outside becomes 0. Offsets
    // within a tile are 32-bit (a row is at most 2^22 elements from the next), which saves the registers of as many
    // addresses as a thread has copies.
    template <int THREADS, typename T>
    static __device__ __forceinline__ void load(u32 tile, const T* x, i64 stride, i32 first, i32 n, i32 width) {
        constexpr int TOTAL = ROWS * CHUNKS;
        x += first * stride;
        n -= first;
        if constexpr (THREADS % CHUNKS == 0) {
            // A thread keeps its column; its rows are STEP apart, which moves the swizzle in a way known here.
            constexpr int STEP = THREADS / CHUNKS;
            static_assert(TOTAL % THREADS == 0 && (STEP & (STEP - 1)) == 0);
            const i32 row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
            const i32 from = row * (i32)stride + chunk * 8;
            const u32 to = tile + offset(row, chunk);
            if (chunk * 8 >= width) n = 0;
#pragma unroll
            for (int i = 0; i < TOTAL / THREADS; i++) {
                constexpr int MASK = PANEL == 8 ? 7 : 3, DIV = PANEL == 8 ? 1 : 2;
                bool on = row + i * STEP < n;
                copy16((to ^ ((i * STEP / DIV & MASK) * 16)) + i * STEP * PITCH,
                       x + (on ? from + i * STEP * (i32)stride : 0), on);
            }
        } else {
            const u32 tid = thread_now();
#pragma unroll
            for (int i = 0; i < (TOTAL + THREADS - 1) / THREADS; i++) {
                u32 at = tid + i * THREADS;
                if (TOTAL % THREADS != 0 && at >= TOTAL) break;
                i32 row = at / CHUNKS, chunk = at % CHUNKS;
                bool on = row < n && chunk * 8 < width;
                copy16(tile + offset(row, chunk), x + (on ? row * (i32)stride + chunk * 8 : 0), on);
            }
        }
    }

    // Writes a warp's accumulator (16 MT rows from `row`, columns from `column`) to its rows of the tensor, by way of its
    // own rows of the tile: nobody else may use these rows any more.
    template <typename T, int MT, int N>
    static __device__ __forceinline__ void store(
        const f32 (&c)[MT][N / 8][4], u32 tile, T* x, i64 stride, i32 first, i32 n, i32 width, int row, int column) {
        u32 lane = thread_now() & 31;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 at = tile + offset(row + m * 16 + half * 8 + lane / 4, column / 8 + j) + (lane & 3) * 4;
                    u32 value = Half<T>::pack(c[m][j][2 * half], c[m][j][2 * half + 1]);
                    shared_put(at, value);
                }
        __syncwarp();
        constexpr int WIDE = N / 8;
#pragma unroll
        for (int i = 0; i < MT * 16 * WIDE / 32; i++) {
            u32 at = lane + i * 32;
            u32 r = row + at / WIDE, chunk = column / 8 + at % WIDE;
            if (first + (i32)r < n && (i32)chunk * 8 < width) {
                *(uint4*)(x + (i64)(first + (i32)r) * stride + chunk * 8) = shared_get4(tile + offset(r, chunk));
            }
        }
    }
};

// The left operand of `scores`: a warp's 16 MT rows of a tile, read from shared memory each time ...
template <typename TILE, int MT>
struct Shared {
    u32 at;
    __device__ __forceinline__ Shared(u32 tile, int row, u32 lane) : at(tile + TILE::lane_down(lane) + row * TILE::PITCH) {}
    __device__ __forceinline__ void fetch() {}
    __device__ __forceinline__ void get(u32 (&a)[4], int m, int k) const { ldmatrix(a, TILE::block(at, m * 16, k * 2)); }
};

// ... or kept in registers from the first `fetch` on.
template <typename TILE, int MT>
struct Held {
    static constexpr int K = TILE::CHUNKS / 2;
    u32 at;
    u32 a[MT][K][4];
    __device__ __forceinline__ Held(u32 tile, int row, u32 lane) : at(tile + TILE::lane_down(lane) + row * TILE::PITCH) {}
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

template <bool HELD, typename TILE, int MT>
struct LeftOf {
    using Type = Shared<TILE, MT>;
};
template <typename TILE, int MT>
struct LeftOf<true, TILE, MT> {
    using Type = Held<TILE, MT>;
};

// c = A B^T: A 16 MT rows, B the N rows of a tile, both C wide. `b` is the lane's place (lane_along) in B.
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

// c += P B: P the packed weights of 16 MT rows over the K rows of a tile, B its N columns from `column` on. `b` is the
// lane's place (lane_down) in B.
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

// Accumulators as the left operand of the next product.
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

// Sets the scores of keys that a query may not see to -inf. `row` and `key` are the warp's first.
template <bool CAUSAL, bool WINDOW, int MT, int N>
__device__ __forceinline__ void hide(f32 (&x)[MT][N / 8][4], i32 row, i32 key, i32 s, i32 window) {
    const i32 tid = thread_now();
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
