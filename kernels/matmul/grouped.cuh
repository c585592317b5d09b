// Computes grouped matrix products of 16-bit floats with mma.sync (sm_80 and later), as mixture-of-experts layers need.
//
// rows: x (T, K), w (E, K, N), ends (E) -> (T, N): the rows of group e times w[e]; rows after the last end are 0. sums:
// a (T, M), b (T, N), ends (E) -> (E, M, N): the rows of group e of a, transposed, times those of b.
//
// Mapping: a block computes a tile of ROWS x COLS, each warp 64 x 64 of it, from slices of DEEP along K, of which
// STAGES are in shared memory or in flight (cp.async). A tile belongs to one group, which the block finds from the ends
// (groups.cuh). The grid has as many blocks as any ends could need; those without rows exit at once. Sums in f32, in
// order of K. Limited by the tensor cores, which mma.sync drives at about two thirds of their rate on sm_90 (see
// grouped_sm90.cuh).
#pragma once
#include "device/tile.cuh"
#include "matmul/groups.cuh"

namespace library {

// Strides in elements. Rows are copied 16 bytes at a time, so contiguous dims start at multiples of 8 elements and are
// padded with zeros after K, M and N up to the next multiple of 8.
struct alignas(8) Grouped {
    GroupEnds ends;
    i64 left, right;   // row stride of x or a, and of w or b
    i64 matrix;        // stride between matrices of w
    i32 m, n, k;       // m is for sums, k for rows
    i32 tiles_m, tiles_n;  // for rows: as many as any ends could need; for sums: those of one group
    i32 unused;
};

// The coordinates of tile number `at` of tiles_m x tiles_n. Blocks start in order of their number. Concurrent blocks
// form a square of tiles rather than a row, which reads less of both operands.
struct TileCoord {
    i32 row, col;
    __device__ __forceinline__ TileCoord(const Grouped& p, u32 at) {
        constexpr u32 BAND = 16;
        const u32 first = at / (BAND * p.tiles_n) * BAND, rest = at - first * p.tiles_n;
        const u32 n = min(BAND, p.tiles_m - first);
        col = rest / n;
        row = first + (rest - col * n);
    }
};

__device__ __forceinline__ i32 padded(i32 n) { return (n + 7) & ~7; }

// One operand of a product: either rows of `x` (`from` to `to`) along the summed dim (k up to `deep`), or columns
// (`from` to `to`) with the summed dim down the rows.
template <typename T>
struct OperandTile {
    const T* x;
    i64 stride;
    i32 from, to, deep;

    // Copies a strip of it that begins at k.
    template <bool DOWN, int WIDE, int DEEP, int THREADS>
    __device__ __forceinline__ void fetch(u32 tile, i32 k) const {
        if constexpr (DOWN) {
            tensor::Tile<WIDE, DEEP>::template load<THREADS>(tile, x + from, stride, k, deep, to - from);
        } else {
            tensor::Tile<DEEP, WIDE>::template load<THREADS>(tile, x + k, stride, from, to, deep - k);
        }
    }
};

// Rows x columns of a tile, depth of a strip, and number of strips in flight.
template <int ROWS_, int COLS_, int DEEP_, int STAGES_>
struct Warps {
    static constexpr int ROWS = ROWS_, COLS = COLS_, DEEP = DEEP_, STAGES = STAGES_;
    static constexpr int ACROSS = COLS / 64, THREADS = ROWS / 64 * ACROSS * 32;
    static constexpr int LEFT = ROWS * DEEP * 2, RIGHT = COLS * DEEP * 2;  // bytes per strip
    typedef f32 Sum[4][8][4];

    // c = the sum over k from `k` to `end`.
    template <typename T, bool LEFT_DOWN, bool RIGHT_DOWN>
    static __device__ __forceinline__ void product(Sum& c, const OperandTile<T>& left, const OperandTile<T>& right, i32 k, i32 end) {
        using namespace tensor;
        typedef Tile<LEFT_DOWN ? ROWS : DEEP, LEFT_DOWN ? DEEP : ROWS> A;
        typedef Tile<RIGHT_DOWN ? COLS : DEEP, RIGHT_DOWN ? DEEP : COLS> B;
        const u32 shared = shared_address(shared_memory), lane = threadIdx.x & 31, warp = warp_index();
        const int row = warp / ACROSS * 64, col = warp % ACROSS * 64;
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[m][j][i] = 0.0f;
        const i32 steps = (end - k + DEEP - 1) / DEEP;
        auto fetch = [&](i32 step, u32 at) {
            if (step < steps) {
                left.template fetch<LEFT_DOWN, ROWS, DEEP, THREADS>(at, k + step * DEEP);
                right.template fetch<RIGHT_DOWN, COLS, DEEP, THREADS>(at + LEFT, k + step * DEEP);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) fetch(s, shared + s * (LEFT + RIGHT));
        u32 now = 0, next = STAGES - 1;
        for (i32 step = 0; step < steps; step++) {
            cp_async_wait<STAGES - 2>();
            // All copies have arrived, and no warp still reads the previous slice.
            __syncthreads();
            fetch(step + STAGES - 1, shared + next * (LEFT + RIGHT));
            const u32 here = shared + now * (LEFT + RIGHT);
            const u32 at = LEFT_DOWN ? A::shift(here + A::lane_along(lane), row) : here + A::lane_down(lane) + row * A::PITCH;
            const u32 bt = here + LEFT;
            const u32 b_at = RIGHT_DOWN ? B::shift(bt + B::lane_down(lane), col) : bt + B::lane_along(lane) + col * B::PITCH;
#pragma unroll
            for (int d = 0; d < DEEP / 16; d++) {
                u32 a[4][4], b[4][4];
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    if constexpr (LEFT_DOWN) ldmatrix_t(a[m], A::block(at, d * 16, m * 2));
                    else ldmatrix(a[m], A::block(at, m * 16, d * 2));
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if constexpr (RIGHT_DOWN) ldmatrix_t(b[j], B::block(b_at, d * 16, j * 2));
                    else ldmatrix(b[j], B::block(b_at, j * 16, d * 2));
                }
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        Half<T>::mma(c[m][2 * j], a[m], b[j][0], b[j][1]);
                        Half<T>::mma(c[m][2 * j + 1], a[m], b[j][2], b[j][3]);
                    }
            }
            if (++now == STAGES) now = 0;
            if (++next == STAGES) next = 0;
        }
        cp_async_wait<0>();
        __syncthreads();
    }

    // Stores a tile to rows `first` to `last` and columns `col` to n of a result.
    template <typename T>
    static __device__ __forceinline__ void store(const Sum& c, T* out, i32 first, i32 last, i32 col, i32 n) {
        using namespace tensor;
        const u32 lane = threadIdx.x & 31, warp = warp_index();
        const int row = warp / ACROSS * 64, across = warp % ACROSS * 64;
        if (n % 8 == 0) {
            Tile<COLS, ROWS>::template store<T, 4, 64>(c, shared_address(shared_memory), out + col, n, first, last,
                                                       n - col, row, across);
            return;
        }
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const i32 r = first + row + m * 16 + i / 2 * 8 + lane / 4, q = col + across + j * 8 + lane % 4 * 2 + i % 2;
                    if (r < last && q < n) out[(i64)r * n + q] = rounded<T>(c[m][j][i]);
                }
    }

    template <typename T>
    static __device__ __forceinline__ T rounded(f32 x) {
        return T{(u16)tensor::Half<T>::pack(x, 0.0f)};
    }
};

// w[e] has contiguous columns (W_DOWN), or contiguous K.
template <typename W, typename T, bool W_DOWN>
__device__ __forceinline__ void grouped_rows(const T* x, const T* w, const i64* ends, T* out, const Grouped& p, Fault* fault) {
    if (blockIdx.x == 0) check_ends(ends, p.ends, fault);
    const TileCoord coord(p, blockIdx.x);
    const i32 col = coord.col * W::COLS;
    const RowRange at = find_tile<W::ROWS>(ends, p.ends, coord.row);
    if (at.group == -2) return;
    const bool some = at.group >= 0;
    const OperandTile<T> left = {x, p.left, at.first, at.last, padded(p.k)};
    const OperandTile<T> right = {w + (some ? at.group : 0) * p.matrix, p.right, col, W_DOWN ? padded(p.n) : p.n,
                           W_DOWN ? p.k : padded(p.k)};
    typename W::Sum c;
    W::template product<T, false, W_DOWN>(c, left, right, 0, some ? p.k : 0);
    W::template store<T>(c, out, at.first, at.last, col, p.n);
}

template <typename W, typename T>
__device__ __forceinline__ void grouped_sums(const T* a, const T* b, const i64* ends, T* out, const Grouped& p, Fault* fault) {
    if (blockIdx.x == 0) check_ends(ends, p.ends, fault);
    const u32 each = p.tiles_m * p.tiles_n, group = blockIdx.x / each;
    const TileCoord coord(p, blockIdx.x - group * each);
    const i32 row = coord.row * W::ROWS, col = coord.col * W::COLS;
    const RowRange at = group_rows(ends, p.ends, group);
    const OperandTile<T> left = {a, p.left, row, padded(p.m), at.last};
    const OperandTile<T> right = {b, p.right, col, padded(p.n), at.last};
    typename W::Sum c;
    W::template product<T, true, true>(c, left, right, at.first, at.last);
    W::template store<T>(c, out + (i64)group * p.m * p.n, row, p.m, col, p.n);
}

// Copies x (E, rows, cols) through any strides to y (E, rows, pitch); columns past `cols` are 0.
template <typename T>
__device__ __forceinline__ void pad_rows(const T* x, T* y, i64 all, i64 rows, i64 cols, i64 pitch, i64 matrix, i64 row, i64 col) {
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= all) return;
    const i64 c = at % pitch, r = at / pitch;
    y[at] = c < cols ? x[r / rows * matrix + r % rows * row + c * col] : T{0};
}

}  // namespace library
