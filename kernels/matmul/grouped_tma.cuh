// Grouped products of 16-bit floats by warpgroups and the copy engine, for sm_90a: as grouped.cuh.
//
// A block makes a tile of ROWS x COLS, each warpgroup 64 x COLS of it by wgmma, from strips of DEEP along the summed dim in a
// ring of STAGES that one thread has the copy engine fill, two steps behind itself. Boxes know nothing of groups: of rows, what
// lies behind a group's last one makes rows that are not stored; of sums, it is set to zero in the last strip, on both sides
// (it may be NaN). Limited by the tensor cores, then by what the L2 cache delivers.
#pragma once
#include "device/warpgroup.cuh"
#include "matmul/grouped.cuh"

namespace library {

// One side of a product in boxes: its columns or rows from `from` on, of matrix `matrix`.
struct Boxed {
    const tensor::TensorMap& map;
    i32 from, matrix;
};

template <int ROWS_, int COLS_, int DEEP_, int STAGES_>
struct Boxes {
    static constexpr int ROWS = ROWS_, COLS = COLS_, DEEP = DEEP_, STAGES = STAGES_;
    static constexpr int GROUPS = ROWS / 64, THREADS = GROUPS * 128, PARTS = COLS / 128;
    static constexpr int LEFT = ROWS * DEEP * 2, RIGHT = COLS * DEEP * 2;  // bytes of a strip
    static_assert(STAGES >= 3 && DEEP % 64 == 0);
    typedef f32 Sum[PARTS][1][16][4];

    // Where 16 of the summed dim of 64 rows, or 128 columns, of a strip lie: those from `from` on, step `d`.
    template <bool DOWN, int WIDE>
    static __device__ __forceinline__ u64 operand(u32 tile, int from, int d) {
        if constexpr (DOWN) return tensor::operand_down(tile + from / 64 * DEEP * 128 + d * 16 * 128, DEEP * 128);
        else return tensor::operand_along(tile + (d / 4 * WIDE + from) * 128 + d % 4 * 32);
    }

    template <bool DOWN, int WIDE>
    static __device__ __forceinline__ void fetch(u32 tile, const Boxed& x, i32 k, u32 barrier) {
        constexpr int PANELS = (DOWN ? WIDE : DEEP) / 64, BYTES = (DOWN ? DEEP : WIDE) * 128;
#pragma unroll
        for (int i = 0; i < PANELS; i++)
            tensor::bring_box(tile + i * BYTES, x.map, (DOWN ? x.from : k) + i * 64, DOWN ? k : x.from, x.matrix, 0, barrier);
    }

    // Zeros for rows `from` on of a strip of which each row is one of the summed dim: WIDE columns in panels.
    template <int WIDE>
    static __device__ __forceinline__ void clear(u32 tile, int from) {
        for (u32 at = (threadIdx.x & 127); at < (u32)((DEEP - from) * (WIDE / 8)); at += 128) {
            const u32 row = from + at / (WIDE / 8), chunk = at % (WIDE / 8);
            const u32 to = tile + (chunk / 8 * DEEP + row) * 128 + chunk % 8 * 16;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
        }
    }

    // c = the sum over k from `k` to `end`. MIXED: behind `end` the strips hold what is not of this sum.
    template <typename T, bool LEFT_DOWN, bool RIGHT_DOWN, bool MIXED>
    static __device__ __forceinline__ void product(Sum& c, const Boxed& left, const Boxed& right, i32 k, i32 end) {
        using namespace tensor;
        const u32 shared = shared_address(shared_memory), lane = threadIdx.x & 31;
        const int group = warp_index() / 4;
        const bool leader = threadIdx.x == 0;
        const i32 steps = (end - k + DEEP - 1) / DEEP;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int j = 0; j < 16; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[part][0][j][i] = 0.0f;
        const Ring<STAGES, GROUPS> ring(shared + STAGES * (LEFT + RIGHT));
        auto feed = [&](i32 n, u32 stage) {
            const u32 at = shared + stage * (LEFT + RIGHT), barrier = ring.barrier(stage);
            barrier_expect(barrier, LEFT + RIGHT);
            fetch<LEFT_DOWN, ROWS>(at, left, k + n * DEEP, barrier);
            fetch<RIGHT_DOWN, COLS>(at + LEFT, right, k + n * DEEP, barrier);
        };
        if (leader) {
            ring.make();
            barriers_made();
            for (i32 n = 0; n < min(steps, STAGES); n++) feed(n, n);
        }
        __syncthreads();
        Turn<STAGES> now;
#pragma unroll 1
        for (i32 n = 0; n < steps; n++) {
            refill(leader, n, steps, now, feed, ring);
            __syncwarp();
            ring.wait(now);
            const u32 here = shared + now.stage * (LEFT + RIGHT);
            if constexpr (MIXED) {
                const int rest = end - k - n * DEEP;
                if (rest < DEEP) {
                    // Its own columns of the left side; of the right side all, as the others do.
                    clear<64>(here + group * DEEP * 128, rest);
                    clear<COLS>(here + LEFT, rest);
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    warpgroup_meet(group);
                }
            }
#pragma unroll
            for (int part = 0; part < PARTS; part++) settle(c[part][0]);
            products_start();
#pragma unroll
            for (int d = 0; d < DEEP / 16; d++) {
                const u64 a = operand<LEFT_DOWN, ROWS>(here, group * 64, d);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    tensor::Product<T, 128>::template shared<RIGHT_DOWN, LEFT_DOWN>(
                        c[part][0], a, operand<RIGHT_DOWN, COLS>(here + LEFT, part * 128, d), true);
            }
            products_end();
            products_wait<1>();
            if (lane == 0 && n > 0) ring.leave(now.template before<1>());
            now.next();
        }
        products_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) settle(c[part][0]);
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

// x in boxes of 64 columns and ROWS rows, w (column, row, matrix) in boxes of 64 columns and DEEP or, if not W_DOWN, COLS rows.
template <typename W, typename T, bool W_DOWN>
__device__ __forceinline__ void grouped_rows_boxes(const tensor::TensorMap& x, const tensor::TensorMap& w, const i64* ends, T* out,
                                                   const Grouped& p, Fault* fault, u32 kernel) {
    if (blockIdx.x == 0) check_ends(ends, p.ends, fault, kernel);
    const Spot spot(p, blockIdx.x);
    const i32 col = spot.col * W::COLS;
    const Piece at = find_tile<W::ROWS>(ends, p.ends, spot.row);
    if (at.group == -2) return;
    const bool some = at.group >= 0;
    typename W::Sum c;
    W::template product<T, false, W_DOWN, false>(c, {x, at.first, 0}, {w, col, some ? at.group : 0}, 0, some ? p.k : 0);
    W::template store<T>(c, out, at.first, at.last, col, p.n);
}

// a and b in boxes of 64 columns and DEEP rows.
template <typename W, typename T>
__device__ __forceinline__ void grouped_sums_boxes(const tensor::TensorMap& a, const tensor::TensorMap& b, const i64* ends, T* out,
                                                   const Grouped& p, Fault* fault, u32 kernel) {
    if (blockIdx.x == 0) check_ends(ends, p.ends, fault, kernel);
    const u32 each = p.tiles_m * p.tiles_n, group = blockIdx.x / each;
    const Spot spot(p, blockIdx.x - group * each);
    const i32 row = spot.row * W::ROWS, col = spot.col * W::COLS;
    const Piece at = group_rows(ends, p.ends, group);
    typename W::Sum c;
    W::template product<T, true, true, true>(c, {a, row, 0}, {b, col, 0}, at.first, at.last);
    W::template store<T>(c, out + (i64)group * p.m * p.n, row, p.m, col, p.n);
}

}  // namespace library
