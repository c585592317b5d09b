// Wraps the PTX of tensor-core kernels on sm_90a: mbarriers, TMA loads (cp.async.bulk.tensor) and wgmma.
//
// A warpgroup is 4 warps; a wgmma has 64 rows, 16 for each warp, and its accumulator has the layout of mma.m16n8k16
// (mma.cuh) for every 8 columns. Tiles have the layout of `Tile` with panels of 64 columns, which TMA writes with a
// 128-byte swizzle. PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once
#include "device/tile.cuh"

namespace tensor {

// A tensor map created by the driver: a tensor and the box that TMA loads from it.
struct __align__(64) TensorMap {
    u64 words[16];
};

// ---- barriers ------------------------------------------------------------------------------------------------------

// A barrier of 8 bytes that completes after `count` arrivals and the announced bytes.
__device__ __forceinline__ void mbarrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
// Makes initialized barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void mbarrier_expect_tx(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// Waits until the phase with this parity is over.
__device__ __forceinline__ void mbarrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(at), "r"(parity) : "memory");
}
// Synchronizes all 128 threads of warpgroup `group`.
__device__ __forceinline__ void warpgroup_sync(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---- TMA -----------------------------------------------------------------------------------------------------------

// Loads one box of a tensor (column, row, head, batch); 0 outside the tensor.
__device__ __forceinline__ void tma_load_box(u32 to, const TensorMap& map, i32 column, i32 row, i32 head, i32 batch, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}
// Loads ROWS rows of C columns, starting at `row`.
template <int C, int ROWS>
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, i32 row, i32 head, i32 batch, u32 barrier) {
#pragma unroll
    for (int panel = 0; panel < C / 64; panel++)
        tma_load_box(to + panel * ROWS * 128, map, panel * 64, row, head, batch, barrier);
}
// Copies `bytes` contiguous bytes: a multiple of 16, with both addresses aligned to 16.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// ---- products ------------------------------------------------------------------------------------------------------

// Orders this warpgroup's accesses to registers before its next products.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of an accumulator across a wait.
template <int N>
__device__ __forceinline__ void fence_registers(f32 (&x)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(x[j][i])::"memory");
}

// Describes an operand in shared memory with K along the rows of a tile (K-major): groups of 8 rows of 128 bytes.
__device__ __forceinline__ u64 k_major_descriptor(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
// Describes one with K down the rows (MN-major): panels of 64 columns are `panel` bytes apart.
__device__ __forceinline__ u64 mn_major_descriptor(u32 at, u32 panel) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(panel >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// clang-format off
#define PL_D4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define PL_D32(d, j) PL_D4(d, j), PL_D4(d, j + 1), PL_D4(d, j + 2), PL_D4(d, j + 3), PL_D4(d, j + 4), PL_D4(d, j + 5), PL_D4(d, j + 6), PL_D4(d, j + 7)
#define PL_D16(d, j) PL_D4(d, j), PL_D4(d, j + 1), PL_D4(d, j + 2), PL_D4(d, j + 3)
#define PL_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PL_R32 PL_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PL_R48 PL_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PL_D8(d, j) PL_D4(d, j), PL_D4(d, j + 1)
#define PL_R24 PL_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PL_R40 PL_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PL_R64 PL_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// For N columns: d (+)= A B with A in shared memory or in registers, and B in shared memory, K-major (DOWN, A_DOWN 0)
// or MN-major (DOWN, A_DOWN 1). If `add` is false, d is overwritten.
#define PL_WGMMA(N, KIND, REGS, OUT, P, A, B, DOWN_B, DOWN_A)                                                          \
    template <int DOWN, int A_DOWN = 0>                                                                                \
    static __device__ __forceinline__ void shared(f32 (&d)[N / 8][4], u64 a, u64 b, bool add) {                        \
        asm volatile(                                                                                                  \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                            \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" REGS "}, %" A ", %" B                 \
            ", p, 1, 1, %" DOWN_A ", %" DOWN_B ";\n}"                                                                  \
            : OUT : "l"(a), "l"(b), "r"((i32)add), "n"(DOWN), "n"(A_DOWN));                                            \
    }

#define PL_WGMMA_REG(N, KIND, REGS, OUT, A0, A1, A2, A3, B, P, ADD)                                                   \
    template <int DOWN>                                                                                                \
    static __device__ __forceinline__ void registers(f32 (&d)[N / 8][4], const u32 (&a)[4], u64 b, bool add) {              \
        asm volatile(                                                                                                  \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                            \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" REGS "}, {%" A0 ", %" A1 ", %" A2     \
            ", %" A3 "}, %" B ", p, 1, 1, %" ADD ";\n}"                                                                \
            : OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((i32)add), "n"(DOWN));                     \
    }

template <typename T, int N>
struct Product;
#define PL_PRODUCTS(T, KIND)                                                                                           \
    template <> struct Product<T, 32> {                                                                                \
        PL_WGMMA(32, KIND, PL_R16, PL_D16(d, 0), "18", "16", "17", "19", "20")                                         \
        PL_WGMMA_REG(32, KIND, PL_R16, PL_D16(d, 0), "16", "17", "18", "19", "20", "21", "22")                        \
    };                                                                                                                 \
    template <> struct Product<T, 64> {                                                                                \
        PL_WGMMA(64, KIND, PL_R32, PL_D32(d, 0), "34", "32", "33", "35", "36")                                         \
        PL_WGMMA_REG(64, KIND, PL_R32, PL_D32(d, 0), "32", "33", "34", "35", "36", "37", "38")                        \
    };                                                                                                                 \
    template <> struct Product<T, 48> {                                                                                \
        PL_WGMMA(48, KIND, PL_R24, PL_D16(d, 0) PL_COMMA PL_D8(d, 4), "26", "24", "25", "27", "28")                    \
        PL_WGMMA_REG(48, KIND, PL_R24, PL_D16(d, 0) PL_COMMA PL_D8(d, 4), "24", "25", "26", "27", "28", "29", "30")   \
    };                                                                                                                 \
    template <> struct Product<T, 80> {                                                                                \
        PL_WGMMA(80, KIND, PL_R40, PL_D32(d, 0) PL_COMMA PL_D8(d, 8), "42", "40", "41", "43", "44")                    \
        PL_WGMMA_REG(80, KIND, PL_R40, PL_D32(d, 0) PL_COMMA PL_D8(d, 8), "40", "41", "42", "43", "44", "45", "46")   \
    };                                                                                                                 \
    template <> struct Product<T, 96> {                                                                                \
        PL_WGMMA(96, KIND, PL_R48, PL_D32(d, 0) PL_COMMA PL_D16(d, 8), "50", "48", "49", "51", "52")                   \
        PL_WGMMA_REG(96, KIND, PL_R48, PL_D32(d, 0) PL_COMMA PL_D16(d, 8), "48", "49", "50", "51", "52", "53", "54")  \
    };                                                                                                                 \
    template <> struct Product<T, 128> {                                                                               \
        PL_WGMMA(128, KIND, PL_R64, PL_D32(d, 0) PL_COMMA PL_D32(d, 8), "66", "64", "65", "67", "68")                  \
        PL_WGMMA_REG(128, KIND, PL_R64, PL_D32(d, 0) PL_COMMA PL_D32(d, 8), "64", "65", "66", "67", "68", "69", "70") \
    };
#define PL_COMMA ,
PL_PRODUCTS(bf16, "bf16")
PL_PRODUCTS(f16, "f16")
// clang-format on

// d = A B^T for this warpgroup's 64 rows of a tile of A_ROWS and the N rows of another tile, both with C columns.
template <typename T, int C, int A_ROWS, int N>
__device__ __forceinline__ void wgmma_k_major(f32 (&d)[N / 8][4], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        Product<T, N>::template shared<0>(
            d, k_major_descriptor(a + k / 4 * A_ROWS * 128 + k % 4 * 32), k_major_descriptor(b + k / 4 * N * 128 + k % 4 * 32),
            k > 0);
}
// The same with A in registers.
template <typename T, int C, int N>
__device__ __forceinline__ void wgmma_k_major(f32 (&d)[N / 8][4], const u32 (&a)[C / 16][4], u32 b) {
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        Product<T, N>::template registers<0>(d, a[k], k_major_descriptor(b + k / 4 * N * 128 + k % 4 * 32), k > 0);
}
// d += W B: W is 64 x K in registers, B a tile of K rows and N columns.
template <typename T, int K, int N>
__device__ __forceinline__ void wgmma_mn_major(f32 (&d)[N / 8][4], const u32 (&w)[K / 16][4], u32 b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
        Product<T, N>::template registers<1>(d, w[k], mn_major_descriptor(b + k * 16 * 128, K * 128), true);
}

// The position in a ring buffer of STAGES tiles: tile n uses stage n % STAGES for the n / STAGES-th time. Positions of
// earlier tiles are derived from it, so they take no registers.
template <int STAGES>
struct PipelineState {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    // The position of tile n - BACK, for n >= BACK.
    template <int BACK>
    __device__ __forceinline__ PipelineState before() const {
        PipelineState t;
        t.stage = stage >= BACK ? stage - BACK : stage + STAGES - BACK;
        t.parity = stage >= BACK ? parity : parity ^ 1;
        return t;
    }
};

// The barriers of a ring buffer of STAGES tiles, which one thread loads and the warps of GROUPS warpgroups consume (see
// attention/forward_sm90.cuh). LANES lanes of each warp arrive when they have consumed a tile: one if only the tensor
// cores read it, all if each lane reads it too. (One after a __syncwarp would suffice, but compute-sanitizer does not
// recognise that.)
template <int STAGES, int GROUPS, int LANES = 1>
struct Pipeline {
    static constexpr u32 BYTES = 16 * STAGES;
    u32 here, used;
    __device__ __forceinline__ explicit Pipeline(u32 at) : here(at), used(at + 8 * STAGES) {}
    __device__ __forceinline__ void make() const {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(here + 8 * s, 1);
            mbarrier_init(used + 8 * s, 4 * GROUPS * LANES);
        }
    }
    // The barrier that a copy into `stage` completes.
    __device__ __forceinline__ u32 barrier(u32 stage) const { return here + 8 * stage; }
    // Waits until the tile has been loaded.
    __device__ __forceinline__ void wait(const PipelineState<STAGES>& t) const { mbarrier_wait(here + 8 * t.stage, t.parity); }
    // Each of LANES lanes signals that it has consumed the tile.
    __device__ __forceinline__ void release(const PipelineState<STAGES>& t) const { mbarrier_arrive(used + 8 * t.stage); }
    __device__ __forceinline__ void wait_released(const PipelineState<STAGES>& t) const {
        mbarrier_wait(used + 8 * t.stage, t.parity);
    }
};

// When the leader reaches tile `n` of `all`, it refills the stage of the tile two before.
template <int STAGES, typename FETCH, typename... PIPES>
__device__ __forceinline__ void refill(
    bool leader, i32 n, i32 all, const PipelineState<STAGES>& now, const FETCH& fetch, const PIPES&... pipes) {
    if (leader && n >= 2 && n - 2 + STAGES < all) {
        const PipelineState<STAGES> old = now.template before<2>();
        (pipes.wait_released(old), ...);
        fetch(n - 2 + STAGES, old.stage);
    }
}

// Skips a tile without rows for this warp: releases it once it has been loaded.
template <int STAGES, typename... PIPES>
__device__ __forceinline__ void skip_tile(u32 lane, PipelineState<STAGES>& now, const PIPES&... pipes) {
    if (lane == 0) ((pipes.wait(now), pipes.release(now)), ...);
    __syncwarp();
    now.next();
}

}  // namespace tensor
