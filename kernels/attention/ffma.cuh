// Tiles and products of attention in f32: every product is an FFMA, so that f32 means f32 (no TF32), on each GPU since
// sm_80. Letters as in tile.cuh.
//
// A block has TC columns of threads. A thread owns the rows r, r + TR, r + 2 TR ... of the block's BM, and of a tile of
// scores every TC-th column; of results it owns 4 columns of every 4 TC. So the lanes of a warp read neighbouring rows, on
// different banks (a row takes C + 4 floats, a row of weights BN + TC), and 16 bytes at a time along the head.
//
// Sums: what one tile adds to a result is summed by itself and added then, so that a result over S keys is a chain of S / BN
// additions of sums of BN; a score is a chain of sums of 4, for 6 % of the time. Both err by less than one chain from end to end:
// scores from end to end had the errors of dq 1.3 to 1.4 times as large.
//
// Limits: reads of shared memory. For RM x RN results a thread reads RM + RN times 16 bytes for 4 RM RN FFMAs; at 8 x 8 the two
// take the same time on sm_90, which has 128 FFMAs and 128 bytes a clock.
#pragma once
#include "attention/documents.cuh"

namespace attention {

constexpr f32 LN2 = 0.6931471805599453f;

// BOTH: the two tensors that are stepped over have a place each, and arrive under the work on the other. Else they take
// turns, in half the room, and it is up to the other blocks of the multiprocessor to fill the time.
template <int C_, int BM_, int BN_, int TC_, int THREADS_, bool BOTH_>
struct FfmaPlan {
    static constexpr int C = C_, BM = BM_, BN = BN_, TC = TC_, THREADS = THREADS_;
    static constexpr bool BOTH = BOTH_;
    static constexpr int TR = THREADS / TC;
    static constexpr int RM = BM / TR, RN = BN / TC, CN = C / TC;
    static constexpr int PITCH = C + 4, WIDE = BN + TC;  // floats
    static_assert(32 % TC == 0 && BM % TR == 0 && BN % TC == 0 && C % (4 * TC) == 0 && C % 32 == 0 && BN % 16 == 0);

    static __device__ __forceinline__ i32 row() { return threadIdx.x / TC; }
    static __device__ __forceinline__ i32 column() { return threadIdx.x % TC; }
};

__device__ __forceinline__ f32* shared_floats() { return (f32*)shared_memory; }

// Rows `first` on of a tensor of `n` rows and `width` columns, ROWS of them, with 0 outside.
template <typename P, int ROWS>
__device__ __forceinline__ void bring_floats(f32* to, const f32* x, i64 stride, i32 first, i32 n, i32 width) {
    constexpr int CHUNKS = P::C / 4, TOTAL = ROWS * CHUNKS;
    const u32 at = shared_address(to);
    x += first * stride;
    n -= first;
#pragma unroll 2
    for (int i = threadIdx.x; i < TOTAL; i += P::THREADS) {
        const i32 row = i / CHUNKS, chunk = i % CHUNKS;
        const bool on = row < n && chunk * 4 < width;
        copy16(at + (row * P::PITCH + chunk * 4) * 4, x + (on ? row * (i32)stride + chunk * 4 : 0), on);
    }
}

// x = A B^T over the head: `a` and `b` are the thread's first rows of two tiles.
template <typename P>
__device__ __forceinline__ void scores_ffma(f32 (&x)[P::RM][P::RN], const f32* a, const f32* b) {
#pragma unroll
    for (int i = 0; i < P::RM; i++)
#pragma unroll
        for (int j = 0; j < P::RN; j++) x[i][j] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < P::C; k += 4) {
        float4 u[P::RM];
#pragma unroll
        for (int i = 0; i < P::RM; i++) u[i] = *(const float4*)(a + i * P::TR * P::PITCH + k);
#pragma unroll
        for (int j = 0; j < P::RN; j++) {
            const float4 w = *(const float4*)(b + j * P::TC * P::PITCH + k);
#pragma unroll
            for (int i = 0; i < P::RM; i++)
                x[i][j] += __fmaf_rn(u[i].w, w.w, __fmaf_rn(u[i].z, w.z, __fmaf_rn(u[i].y, w.y, u[i].x * w.x)));
        }
    }
}

// y = fade y + W B: W the block's weights, `w` the thread's first row of them; B a tile of BN rows, `b` the thread's first
// columns of it. PIECE columns at a time, for want of registers.
template <typename P, int PIECE>
__device__ __forceinline__ void weighted_ffma(
    f32 (&y)[P::RM][P::CN], const f32 (&fade)[P::RM], const f32* w, const f32* b) {
    static_assert(PIECE % 4 == 0 && P::CN % PIECE == 0);
#pragma unroll
    for (int from = 0; from < P::CN; from += PIECE) {
        f32 sum[P::RM][PIECE];
#pragma unroll
        for (int i = 0; i < P::RM; i++)
#pragma unroll
            for (int c = 0; c < PIECE; c++) sum[i][c] = 0.0f;
#pragma unroll 2
        for (int k = 0; k < P::BN; k += 4) {
            float4 u[P::RM];
#pragma unroll
            for (int i = 0; i < P::RM; i++) u[i] = *(const float4*)(w + i * P::TR * P::WIDE + k);
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int c = 0; c < PIECE; c += 4) {
                    const float4 x = *(const float4*)(b + (k + n) * P::PITCH + (from + c) * P::TC);
#pragma unroll
                    for (int i = 0; i < P::RM; i++) {
                        const f32 by = n == 0 ? u[i].x : n == 1 ? u[i].y : n == 2 ? u[i].z : u[i].w;
                        sum[i][c] = __fmaf_rn(by, x.x, sum[i][c]);
                        sum[i][c + 1] = __fmaf_rn(by, x.y, sum[i][c + 1]);
                        sum[i][c + 2] = __fmaf_rn(by, x.z, sum[i][c + 2]);
                        sum[i][c + 3] = __fmaf_rn(by, x.w, sum[i][c + 3]);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < P::RM; i++)
#pragma unroll
            for (int c = 0; c < PIECE; c++) y[i][from + c] = __fmaf_rn(y[i][from + c], fade[i], sum[i][c]);
    }
}

// Columns of a result that weighted_ffma makes at a time: at most 64 sums a thread.
template <typename P, int MOST>
struct Piece {
    static constexpr int FITS = MOST / P::RM;
    static constexpr int N = P::CN <= FITS ? P::CN : FITS >= 8 && P::CN % 8 == 0 ? 8 : 4;
};

// Where a thread's scores are among the block's weights.
template <typename P>
__device__ __forceinline__ f32* weight_at(f32* w, int i, int j) {
    return w + (P::row() + i * P::TR) * P::WIDE + P::column() + j * P::TC;
}
template <typename P>
__device__ __forceinline__ void put_weights(f32* w, const f32 (&x)[P::RM][P::RN]) {
#pragma unroll
    for (int i = 0; i < P::RM; i++)
#pragma unroll
        for (int j = 0; j < P::RN; j++) *weight_at<P>(w, i, j) = x[i][j];
}

// A thread's part of a result, each row times `by`, to rows `first` on of a tensor.
template <typename P>
__device__ __forceinline__ void store_floats(
    f32 (&y)[P::RM][P::CN], const f32 (&by)[P::RM], f32* x, i64 stride, i32 first, i32 n, i32 width) {
#pragma unroll
    for (int i = 0; i < P::RM; i++) {
        const i32 row = first + P::row() + i * P::TR;
        if (row >= n) break;
#pragma unroll
        for (int c = 0; c < P::CN; c += 4) {
            const i32 column = c * P::TC + P::column() * 4;
            if (column < width)
                *(float4*)(x + row * stride + column) =
                    make_float4(y[i][c] * by[i], y[i][c + 1] * by[i], y[i][c + 2] * by[i], y[i][c + 3] * by[i]);
        }
    }
}

// ---- masks ---------------------------------------------------------------------------------------------------------

// What the ROWS rows from `first` on see of the other side by their documents: from, to; all of them from, to. Everything
// without documents.
template <int ROWS, typename D>
__device__ __forceinline__ int4 seen_of(const D& documents, i32 first, i32 t) {
    int4 y = make_int4(0, 0x7fffffff, 0, 0x7fffffff);
    if constexpr (D::ON) {
        y.x = t;
        y.y = 0;
        for (i32 row = first; row < min(first + ROWS, t); row = (row / STRETCH + 1) * STRETCH) {
            const int4 one = documents.at(row, t);
            y = make_int4(min(y.x, one.x), max(y.y, one.y), max(y.z, one.z), min(y.w, one.w));
        }
    }
    return y;
}

// Sets what a thread has of rows and columns in different documents to `by`.
template <typename P, typename D>
__device__ __forceinline__ void hide_documents(f32 (&x)[P::RM][P::RN], const D& documents, i32 row, i32 column, f32 by) {
    if constexpr (D::ON) {
        i32 of[P::RN];
#pragma unroll
        for (int j = 0; j < P::RN; j++) of[j] = label(documents.labels + column + P::column() + j * P::TC);
#pragma unroll
        for (int i = 0; i < P::RM; i++) {
            const i32 r = label(documents.labels + row + P::row() + i * P::TR);
#pragma unroll
            for (int j = 0; j < P::RN; j++) x[i][j] = of[j] == r ? x[i][j] : by;
        }
    }
}

// Sets the scores of keys that a query may not see to -inf; `row` and `key` are the tile's first.
template <typename P, bool CAUSAL, bool WINDOW>
__device__ __forceinline__ void hide_scores(f32 (&x)[P::RM][P::RN], i32 row, i32 key, i32 s, i32 window) {
    row += P::row();
    key += P::column();
#pragma unroll
    for (int i = 0; i < P::RM; i++)
#pragma unroll
        for (int j = 0; j < P::RN; j++) {
            const i32 r = row + i * P::TR, c = key + j * P::TC;
            const bool seen = c < s && (!CAUSAL || c <= r) && (!WINDOW || c > r - window);
            x[i][j] = seen ? x[i][j] : -infinity();
        }
}

}  // namespace attention
