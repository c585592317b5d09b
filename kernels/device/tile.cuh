// Loads and stores tiles of rows in shared memory, swizzled for ldmatrix and wgmma.
#pragma once
#include "device/mma.cuh"

namespace tensor {

extern __shared__ __align__(1024) unsigned char shared_memory[];

// ROWS rows of C elements, in panels of 64 columns (of 32 if C is not a multiple of 64), each a dense ROWS x panel
// block. Within a panel, the 16-byte chunk c of row i is stored at chunk c ^ i (c ^ i/2), so that the 8 rows that a
// phase of ldmatrix reads cover all 32 banks.
template <int C, int ROWS>
struct Tile {
    static_assert(C % 32 == 0 && ROWS % 16 == 0);
    static constexpr int CHUNKS = C / 8;
    static constexpr int PANEL = C % 64 == 0 ? 8 : 4;  // in chunks
    static constexpr int PITCH = PANEL * 16;           // in bytes
    static constexpr int BYTES = C * ROWS * 2;

    static __device__ __forceinline__ u32 swizzle(u32 row) { return PANEL == 8 ? row & 7 : (row >> 1) & 3; }
    static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
        return (chunk / PANEL * ROWS + row) * PITCH + ((chunk % PANEL ^ swizzle(row)) * 16);
    }
    // The address that a lane passes to ldmatrix in the tile's first 16 x 16 block. With `down`, its 8 x 8 matrices go
    // down the rows first, as A needs them (and B of a transposed tile); otherwise along the columns.
    static __device__ __forceinline__ u32 lane_down(u32 lane) { return offset(lane & 15, lane >> 4); }
    static __device__ __forceinline__ u32 lane_along(u32 lane) {
        return offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    }
    // The same lane's address in the block at (row, chunk): multiples of 16 and 2, known to the compiler. The tile
    // starts at a multiple of 1024, so the swizzle is an exclusive or on the address itself.
    static __device__ __forceinline__ u32 block(u32 at, int row, int chunk) {
        return (at ^ (chunk % PANEL * 16)) + (chunk / PANEL * ROWS + row) * PITCH;
    }

    // The same address `column` columns further on, a multiple of a panel that the compiler does not know.
    static __device__ __forceinline__ u32 shift(u32 at, int column) {
        return at + column / (PANEL * 8) * (ROWS * PITCH);
    }

    // Loads rows starting at `first` of a tensor with `n` rows and `width` columns; 0 outside. Offsets within a tile
    // are 32-bit (a row stride is at most 2^22 elements), which saves a 64-bit address per copy of a thread.
    template <int THREADS, typename T>
    static __device__ __forceinline__ void load(u32 tile, const T* x, i64 stride, i32 first, i32 n, i32 width) {
        constexpr int TOTAL = ROWS * CHUNKS;
        x += first * stride;
        n -= first;
        if constexpr (THREADS % CHUNKS == 0) {
            // A thread keeps its column; its rows are STEP apart, which changes the swizzle in a way known at compile
            // time.
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
                cp_async_16((to ^ ((i * STEP / DIV & MASK) * 16)) + i * STEP * PITCH,
                       x + (on ? from + i * STEP * (i32)stride : 0), on);
            }
        } else {
            const u32 tid = read_tid();
#pragma unroll
            for (int i = 0; i < (TOTAL + THREADS - 1) / THREADS; i++) {
                u32 at = tid + i * THREADS;
                if (TOTAL % THREADS != 0 && at >= TOTAL) break;
                i32 row = at / CHUNKS, chunk = at % CHUNKS;
                bool on = row < n && chunk * 8 < width;
                cp_async_16(tile + offset(row, chunk), x + (on ? row * (i32)stride + chunk * 8 : 0), on);
            }
        }
    }

    // Stores a warp's accumulator (16 MT rows from `row`, columns from `column`) to its rows of the tensor, through its
    // own rows of the tile: no other warp may still use these rows.
    template <typename T, int MT, int N>
    static __device__ __forceinline__ void store(
        const f32 (&c)[MT][N / 8][4], u32 tile, T* x, i64 stride, i32 first, i32 n, i32 width, int row, int column) {
        u32 lane = read_tid() & 31;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 at = tile + offset(row + m * 16 + half * 8 + lane / 4, column / 8 + j) + (lane & 3) * 4;
                    u32 value = Half<T>::pack(c[m][j][2 * half], c[m][j][2 * half + 1]);
                    store_shared(at, value);
                }
        __syncwarp();
        constexpr int WIDE = N / 8;
#pragma unroll
        for (int i = 0; i < MT * 16 * WIDE / 32; i++) {
            u32 at = lane + i * 32;
            u32 r = row + at / WIDE, chunk = column / 8 + at % WIDE;
            if (first + (i32)r < n && (i32)chunk * 8 < width) {
                *(uint4*)(x + (i64)(first + (i32)r) * stride + chunk * 8) = load_shared4(tile + offset(r, chunk));
            }
        }
    }
};

}  // namespace tensor
