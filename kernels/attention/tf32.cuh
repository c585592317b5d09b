// Defines attention's tiles and matrix products in f32: mma.sync m16n8k8 on TF32 (sm_80 and later). Letters as in
// tile.cuh.
//
// PRODUCTS = 1: operands are rounded to TF32 (11 bits), for precision "tf32". PRODUCTS = 3: an operand is x = hi + lo,
// with hi rounded to TF32 and lo the exact remainder, and a product is lo hi + hi lo + hi hi. It equals the f32 product
// except for lo lo, at most 2^-22 of it, and the last bit of lo. Ootomo and Yokota, arXiv:2203.03341; CUTLASS calls it
// FastF32. Operands are split in registers each time they are read; this takes less time than the three products on the
// tensor cores.
//
// Fragments, for lane = 4 g + t:
//   A (16 x 8): a[0] row g, column t; a[1] row g+8; a[2], a[3] column t+4.   B (8 x 8): b[0] row t, column g; b[1] row t+4.
//   C (16 x 8): c[0], c[1] row g, columns 2t and 2t+1; c[2], c[3] row g+8.
// A column of A and the same row of B may be permuted together:
//   Scores: lane t owns 8 columns of every 32 of the head, 4 at a time: one 16-byte read feeds two steps.
//   Weighted sums: the keys of a step are ordered 0 2 4 6 1 3 5 7, so that scores are the left operand of the next
//   product unchanged. Columns of the result are permuted too: column g of four adjacent B is column 4 g + j, j < 4,
//   which is one read of 16 bytes; a lane then has 8 adjacent columns of the result.
// A row takes C + 4 floats, which puts every 8 lanes of these reads on different banks.
//
// Tensor cores truncate the sums they accumulate, so they accumulate few terms: 16 columns of the head for scores, at
// most one tile for results, the small products first. These partial sums are added with FADD, which rounds to nearest.
#pragma once
#include "attention/mask_range.cuh"

namespace attention {

constexpr f32 LN2 = 0.6931471805599453f;

// Each SIDE of WARPS has 16 MT rows; the other side is processed in steps of BN with STAGES buffers. SIDE = 2: two
// warps share their rows. Each computes the scores of half of a step (KEYS) and half of the results' columns, and they
// exchange scores through shared memory.
template <int C_, int PRODUCTS_, int WARPS_, int MT_, int BN_, int STAGES_, int SIDE_>
struct Tf32Plan {
    static constexpr int C = C_, PRODUCTS = PRODUCTS_, WARPS = WARPS_, MT = MT_, BN = BN_, STAGES = STAGES_, SIDE = SIDE_;
    static constexpr int ROWS = 16 * MT, BM = ROWS * WARPS / SIDE, THREADS = 32 * WARPS, COLUMNS = C / SIDE, KEYS = BN / SIDE;
    static constexpr int PITCH = C + 4, WIDE = BN + 8;  // floats
    static_assert(C % 32 == 0 && KEYS % 8 == 0 && COLUMNS % 32 == 0 && (PRODUCTS == 1 || PRODUCTS == 3));
    static_assert(SIDE == 1 || (SIDE == 2 && WARPS % 2 == 0 && BN % 16 == 0));

    // The index of this warp's 16 MT rows in the block, and its index among the warps that share them.
    static __device__ __forceinline__ i32 rows(i32 tid) { return tid / (32 * SIDE); }
    static __device__ __forceinline__ i32 side(i32 tid) { return SIDE == 1 ? 0 : tid / 32 % SIDE; }

    // This thread's first float: in the left operand of scores among the block's own rows (`left`), in their right
    // operand in a tile of the other side (`right`), in B of weighted sums there (`down`), and in the weights
    // (`weights`). Recomputed at each use, which costs less than keeping registers across the loop.
    static __device__ __forceinline__ i32 left() {
        const i32 tid = read_tid();
        return (rows(tid) * ROWS + tid % 32 / 4) * PITCH + tid % 4 * 8;
    }
    static __device__ __forceinline__ i32 right() {
        const i32 tid = read_tid();
        return (side(tid) * KEYS + tid % 32 / 4) * PITCH + tid % 4 * 8;
    }
    static __device__ __forceinline__ i32 down() {
        const i32 tid = read_tid();
        return tid % 4 * 2 * PITCH + side(tid) * COLUMNS + tid % 32 / 4 * 4;
    }
    static __device__ __forceinline__ i32 weights() {
        const i32 tid = read_tid();
        return (rows(tid) * ROWS + tid % 32 / 4) * WIDE + tid % 4 * 2;
    }
};

__device__ __forceinline__ f32* shared_f32() { return (f32*)shared_memory; }

// Loads ROWS rows starting at `first` of a tensor with `n` rows and `width` columns; 0 outside.
template <typename P, int ROWS>
__device__ __forceinline__ void load_tile_f32(f32* tile, const f32* x, i64 stride, i32 first, i32 n, i32 width) {
    constexpr int CHUNKS = P::C / 4, TOTAL = ROWS * CHUNKS, THREADS = P::THREADS;
    const u32 to = shared_address(tile);
    x += first * stride;
    n -= first;
    if constexpr (THREADS % CHUNKS == 0 && TOTAL % THREADS == 0) {
        // A thread keeps its column; its rows are STEP apart.
        constexpr int STEP = THREADS / CHUNKS;
        const i32 tid = read_tid(), row = tid / CHUNKS, chunk = tid % CHUNKS;
        const i32 from = row * (i32)stride + chunk * 4;
        const u32 at = to + (row * P::PITCH + chunk * 4) * 4;
        if (chunk * 4 >= width) n = 0;
#pragma unroll
        for (int i = 0; i < TOTAL / THREADS; i++) {
            const bool on = row + i * STEP < n;
            cp_async_16(at + i * STEP * P::PITCH * 4, x + (on ? from + i * STEP * (i32)stride : 0), on);
        }
    } else {
#pragma unroll 2
        for (int i = read_tid(); i < TOTAL; i += THREADS) {
            const i32 row = i / CHUNKS, chunk = i % CHUNKS;
            const bool on = row < n && chunk * 4 < width;
            cp_async_16(to + (row * P::PITCH + chunk * 4) * 4, x + (on ? row * (i32)stride + chunk * 4 : 0), on);
        }
    }
}

// ---- products ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma_tf32(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Converts N floats to operands. Tensor cores ignore the last 13 bits.
//
// Three products: hi is rounded by integer arithmetic, since cvt.rna.tf32.f32 would take twice as many instructions on
// sm_90. (A NaN that this turns into another value is still a NaN in lo. Truncating hi instead of rounding it would
// save a tenth of all instructions and 2 to 3 % of the time, but the error would be up to 1.7 times as large.) An
// infinity makes its products NaN.
//
// One product: the truncation is compensated by a multiplication that adds 0.35 to 0.7 of the last bit that is read.
// Its error is within 6 % of that of rounding, it leaves TF32 values and NaN unchanged, and it takes one instruction
// instead of two.
template <int PRODUCTS, int N>
struct Split {
    u32 hi[N], lo[PRODUCTS == 3 ? N : 1];
    __device__ __forceinline__ void set(int i, f32 x) {
        if constexpr (PRODUCTS == 3) {
            hi[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
            lo[i] = __float_as_uint(x - __uint_as_float(hi[i]));
        } else {
            hi[i] = __float_as_uint(x * 1.00034f);
        }
    }
};

// x = A B^T over the head: A has 16 MT rows, B has KEYS rows of a tile; `a` and `b` are the thread's offsets (`left`,
// `right`).
template <typename P>
__device__ __forceinline__ void scores_tf32(f32 (&x)[P::MT][P::KEYS / 8][4], const f32* a, const f32* b) {
    constexpr int MT = P::MT, N = P::KEYS;
    constexpr bool THREE = P::PRODUCTS == 3;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][j][i] = 0.0f;
    // Not unrolled, because that takes up to 20 more registers.
#pragma unroll 1
    for (int k = 0; k < P::C / 16; k++) {
        const int column = k / 2 * 32 + k % 2 * 4;
        Split<P::PRODUCTS, 4> u[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 w = *(const float4*)(a + (m * 16 + h * 8) * P::PITCH + column);
                u[m][0].set(h, w.x);
                u[m][0].set(h + 2, w.y);
                u[m][1].set(h, w.z);
                u[m][1].set(h + 2, w.w);
            }
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float4 w = *(const float4*)(b + j * 8 * P::PITCH + column);
            Split<P::PRODUCTS, 4> v;
            v.set(0, w.x);
            v.set(1, w.y);
            v.set(2, w.z);
            v.set(3, w.w);
            if constexpr (THREE) {
                f32 c[MT][4];
#pragma unroll
                for (int m = 0; m < MT; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.0f;
#pragma unroll
                for (int s = 0; s < 2; s++) {
#pragma unroll
                    for (int m = 0; m < MT; m++) mma_tf32(c[m], u[m][s].lo, v.hi[2 * s], v.hi[2 * s + 1]);
#pragma unroll
                    for (int m = 0; m < MT; m++) mma_tf32(c[m], u[m][s].hi, v.lo[2 * s], v.lo[2 * s + 1]);
                }
#pragma unroll
                for (int s = 0; s < 2; s++)
#pragma unroll
                    for (int m = 0; m < MT; m++) mma_tf32(c[m], u[m][s].hi, v.hi[2 * s], v.hi[2 * s + 1]);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][j][i] += c[m][i];
            } else {
#pragma unroll
                for (int s = 0; s < 2; s++)
#pragma unroll
                    for (int m = 0; m < MT; m++) mma_tf32(x[m][j], u[m][s].hi, v.hi[2 * s], v.hi[2 * s + 1]);
            }
        }
    }
}

// The left operand of weighted sums: scores as their product left them in registers ...
template <typename P>
struct RegisterWeights {
    const f32 (&x)[P::MT][P::KEYS / 8][4];
    __device__ __forceinline__ void get(f32 (&w)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = x[m][k][i];
    }
};

// ... or scores of two adjacent warps in shared memory: BM rows of WIDE floats. `at` is the thread's offset
// (`weights`).
template <typename P>
struct SharedWeights {
    f32* at;
    __device__ __forceinline__ void get(f32 (&w)[4], int m, int k) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 two = *(const float2*)(at + (m * 16 + h * 8) * P::WIDE + k * 8);
            w[2 * h] = two.x;
            w[2 * h + 1] = two.y;
        }
    }
    __device__ __forceinline__ void put(const f32 (&x)[P::MT][P::KEYS / 8][4]) const {
        f32* const to = at + P::side(read_tid()) * P::KEYS;
#pragma unroll
        for (int m = 0; m < P::MT; m++)
#pragma unroll
            for (int j = 0; j < P::KEYS / 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    *(float2*)(to + (m * 16 + h * 8) * P::WIDE + j * 8) =
                        make_float2(x[m][j][2 * h], x[m][j][2 * h + 1]);
    }
};

// Barrier of the two warps that share rows.
template <typename P>
__device__ __forceinline__ void pair_sync() {
    asm volatile("bar.sync %0, 64;" ::"r"(P::rows(read_tid()) + 1) : "memory");
}

// For two warps that skip a tile, at whose barriers the others meet TIMES times. Only compute-sanitizer's racecheck
// needs this; otherwise it reports races across barriers of the block (docs/adr/078-racecheck-clean.md).
template <typename P, int TIMES>
__device__ __forceinline__ void pair_sync_idle() {
    if constexpr (P::SIDE == 2) {
#pragma unroll
        for (int i = 0; i < TIMES; i++) pair_sync<P>();
    }
}

// y = fade y + W B: W are the weights, B the BN rows of a tile and COLUMNS of its columns; `b` is the thread's offset
// (`down`) in it. fade(m, h) belongs to row 16 m + 8 h + g. Tensor cores accumulate CHAIN rows of B at a time.
template <typename P, int CHAIN = P::BN, typename W, typename F>
__device__ __forceinline__ void weighted_tf32(f32 (&y)[P::MT][P::COLUMNS / 8][4], const W& weights, const f32* b, F rescale) {
    constexpr int MT = P::MT, K = P::BN, N = P::COLUMNS;
    constexpr bool THREE = P::PRODUCTS == 3;
    static_assert(K % CHAIN == 0);
#pragma unroll
    for (int n = 0; n < N / 32; n++) {
#pragma unroll
        for (int first = 0; first < K; first += CHAIN) {
            // Weights are reloaded and split again for each piece, because keeping them would take registers.
            if (P::SIDE == 2) __syncwarp();
            f32 c[MT][4][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) c[m][j][i] = 0.0f;
#pragma unroll
            for (int k = first / 8; k < (first + CHAIN) / 8; k++) {
                Split<P::PRODUCTS, 4> u[MT], v[2];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    f32 w[4];
                    weights.get(w, m, k);
                    u[m].set(0, w[0]);
                    u[m].set(1, w[2]);
                    u[m].set(2, w[1]);
                    u[m].set(3, w[3]);
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float4 row = *(const float4*)(b + (k * 8 + r) * P::PITCH + n * 32);
                    v[r].set(0, row.x);
                    v[r].set(1, row.y);
                    v[r].set(2, row.z);
                    v[r].set(3, row.w);
                }
                if constexpr (THREE) {
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) mma_tf32(c[m][j], u[m].lo, v[0].hi[j], v[1].hi[j]);
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) mma_tf32(c[m][j], u[m].hi, v[0].lo[j], v[1].lo[j]);
                }
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) mma_tf32(c[m][j], u[m].hi, v[0].hi[j], v[1].hi[j]);
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        f32& to = y[m][n * 4 + j][i];
                        to = first == 0 ? __fmaf_rn(to, rescale(m, i / 2), c[m][j][i]) : to + c[m][j][i];
                    }
        }
    }
}

// Without rescaling.
struct NoRescale {
    __device__ __forceinline__ f32 operator()(int, int) const { return 1.0f; }
};

// Stores the results of weighted_tf32, each row multiplied by by(m, h), to the rows of a tensor starting at `first`;
// the warp's own rows are among them.
template <typename P, typename F>
__device__ __forceinline__ void store_tile_f32(
    const f32 (&y)[P::MT][P::COLUMNS / 8][4], F by, f32* x, i64 stride, i32 first, i32 n, i32 width) {
    const i32 tid = read_tid(), column = P::side(tid) * P::COLUMNS + tid % 4 * 8;
#pragma unroll
    for (int m = 0; m < P::MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i32 row = first + P::rows(tid) * P::ROWS + m * 16 + h * 8 + tid % 32 / 4;
            const f32 f = by(m, h);
#pragma unroll
            for (int j = 0; j < P::COLUMNS / 8; j += 4)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    const i32 c = column + j * 8 + (i & 1) * 4;
                    if (row < n && c < width)
                        *(float4*)(x + row * stride + c) =
                            make_float4(y[m][j][i] * f, y[m][j + 1][i] * f, y[m][j + 2][i] * f, y[m][j + 3][i] * f);
                }
        }
}

template <int MT, int N>
__device__ __forceinline__ void clear(f32 (&y)[MT][N][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) y[m][j][i] = 0.0f;
}

}  // namespace attention
