// Computes grouped matrix products of 16-bit floats with wgmma (sm_90a): results as in grouped.cuh.
//
// Mapping: a block computes a tile of ROWS x COLS, each warpgroup 64 x COLS of it. Both operands are read from shared
// memory, where cp.async writes them: unlike TMA boxes, its copies end at a group's last row, so that sums over a
// group's rows need no masking. The wgmma of one slice overlaps the wait for the next; a stage is refilled two steps
// later, when every warpgroup has consumed it. Limited by the tensor cores, then by shared memory (COLS = 128: 96 bytes
// per clock).
#pragma once
#include "device/warpgroup.cuh"
#include "matmul/grouped.cuh"

namespace library {

template <int ROWS_, int COLS_, int DEEP_, int STAGES_>
struct Warpgroups {
    static constexpr int ROWS = ROWS_, COLS = COLS_, DEEP = DEEP_, STAGES = STAGES_;
    static constexpr int THREADS = ROWS * 2, PARTS = COLS / 128;
    static constexpr int LEFT = ROWS * DEEP * 2, RIGHT = COLS * DEEP * 2;  // bytes per strip
    static constexpr int AHEAD = STAGES - 2;
    static_assert(AHEAD >= 1 && DEEP % 64 == 0);
    typedef f32 Sum[PARTS][1][16][4];

    // The wgmma descriptor of 16 elements along K for 64 rows, or 128 columns, of a slice, starting at `from`, step
    // `d`.
    template <bool DOWN, int WIDE>
    static __device__ __forceinline__ u64 operand(u32 tile, int from, int d) {
        if constexpr (DOWN) return tensor::mn_major_descriptor(tile + from / 64 * DEEP * 128 + d * 16 * 128, DEEP * 128);
        else return tensor::k_major_descriptor(tile + (d / 4 * WIDE + from) * 128 + d % 4 * 32);
    }

    template <typename T, bool LEFT_DOWN, bool RIGHT_DOWN>
    static __device__ __forceinline__ void product(Sum& c, const OperandTile<T>& left, const OperandTile<T>& right, i32 k, i32 end) {
        using namespace tensor;
        const u32 shared = shared_address(shared_memory);
        const int row = warp_index() / 4 * 64;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int j = 0; j < 16; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[part][0][j][i] = 0.0f;
        const i32 steps = (end - k + DEEP - 1) / DEEP;
        auto fetch = [&](i32 step, u32 at) {
            if (step < steps) {
                left.template fetch<LEFT_DOWN, ROWS, DEEP, THREADS>(at, k + step * DEEP);
                right.template fetch<RIGHT_DOWN, COLS, DEEP, THREADS>(at + LEFT, k + step * DEEP);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < AHEAD; s++) fetch(s, shared + s * (LEFT + RIGHT));
        u32 now = 0, next = AHEAD;
        for (i32 step = 0; step < steps; step++) {
            cp_async_wait<AHEAD - 1>();
            // Makes the copies visible to the tensor cores of all warps.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            const u32 here = shared + now * (LEFT + RIGHT);
#pragma unroll
            for (int part = 0; part < PARTS; part++) fence_registers(c[part][0]);
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < DEEP / 16; d++) {
                const u64 a = operand<LEFT_DOWN, ROWS>(here, row, d);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    tensor::Product<T, 128>::template shared<RIGHT_DOWN, LEFT_DOWN>(
                        c[part][0], a, operand<RIGHT_DOWN, COLS>(here + LEFT, part * 128, d), true);
            }
            wgmma_commit();
            fetch(step + AHEAD, shared + next * (LEFT + RIGHT));
            wgmma_wait<1>();
            if (++now == STAGES) now = 0;
            if (++next == STAGES) next = 0;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) fence_registers(c[part][0]);
        cp_async_wait<0>();
        __syncthreads();
    }

    template <typename T>
    static __device__ __forceinline__ void store(const Sum& c, T* out, i32 first, i32 last, i32 col, i32 n) {
        using namespace tensor;
        const u32 lane = threadIdx.x & 31;
        const int row = warp_index() * 16;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (n % 8 == 0) {
                Tile<COLS, ROWS>::template store<T, 1, 128>(c[part], shared_address(shared_memory), out + col, n, first, last,
                                                            n - col, row, part * 128);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 16; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const i32 r = first + row + i / 2 * 8 + lane / 4, q = col + part * 128 + j * 8 + lane % 4 * 2 + i % 2;
                    if (r < last && q < n) out[(i64)r * n + q] = T{(u16)Half<T>::pack(c[part][0][j][i], 0.0f)};
                }
        }
    }
};

}  // namespace library
