// Computes which tiles of the other side a block of attention visits, and which of them a group of its rows needs, for
// causal, window and segment masks.
//
// BM is the number of rows of the block, ROWS that of a group (a warp, two warps that share rows, or a warpgroup).
// `first` and `top` are the first rows of the block and of the group; `key` or `query` is the first position of a tile
// of BN. The member `top` counts positions as the other side does, whose positions may be shifted (`B`).
#pragma once
#include "attention/key_block.cuh"
#include "attention/segment_ids.cuh"

namespace attention {

// The part common to both directions.
template <int BM, int BN, typename D>
struct MaskRange {
    D ids;           // the segment ids of the batch
    i32 begin, end;   // range of the block; `begin` is a multiple of BN
    i32 top;
    int4 near = {};   // segments: keys visible to any row of the group, and to all of them

    // Of `n` rows. `own`: the first of the group, by its own position.
    __device__ __forceinline__ void clamp_to_segments(const D& segments, i32 batch, i32 n, i32 first, i32 own) {
        ids = segments.of(batch, n);
        if constexpr (D::ON) {
            const int2 span = ids.template span<BM>(first, n);
            begin = max(begin, span.x / BN * BN);
            end = min(end, span.y);
            near = ids.at(own, n);
        }
    }
    // The range in tiles.
    __device__ __forceinline__ i32 steps() const { return max(end - begin + BN - 1, 0) / BN; }
};

// Rows are queries.
template <int BM, int BN, int ROWS, bool CAUSAL, bool WINDOW, typename D, typename B = AllKeys>
struct KeyRange : MaskRange<BM, BN, D> {
    using MaskRange<BM, BN, D>::begin, MaskRange<BM, BN, D>::end, MaskRange<BM, BN, D>::top, MaskRange<BM, BN, D>::near, MaskRange<BM, BN, D>::ids;

    B keys;

    __device__ __forceinline__ KeyRange(
        const Problem& p, const D& segments, i32 batch, i32 first, i32 top_, const B& keys_ = {})
        : keys(keys_) {
        top = top_ + keys.shift;
        const i32 last = min(first + BM, p.t) - 1 + keys.shift;
        end = CAUSAL ? min(p.s, last + 1) : p.s;
        begin = WINDOW ? max(first + keys.shift - p.window + 1, 0) / BN * BN : 0;
        this->clamp_to_segments(segments, batch, p.t, first, top_);
    }
    // Whether any key of the tile is visible to any row of the group.
    __device__ __forceinline__ bool sees(const Problem& p, i32 key) const {
        return (!CAUSAL || key <= top + ROWS - 1) && (!WINDOW || key + BN - 1 > top - p.window) &&
               (!D::ON || (key < near.y && key + BN > near.x));
    }
    // The number of tiles up to the last one that the group needs, and the number of those before the first one.
    __device__ __forceinline__ i32 steps_to_last() const {
        i32 own = CAUSAL ? min(end, top + ROWS) : end;
        if (D::ON) own = min(own, near.y);
        return max(own - begin + BN - 1, 0) / BN;
    }
    __device__ __forceinline__ i32 steps_to_first(const Problem& p, i32 to_last) const {
        i32 y = WINDOW ? min(max(top - p.window + 1 - begin, 0) / BN, to_last) : 0;
        if (D::ON) y = max(y, min(max(near.x - begin, 0) / BN, to_last));
        return y;
    }
    // Sets the scores of keys that a query may not attend to to -inf: 16 MT of the group's rows starting at `row`, N
    // keys of the tile starting at `mine`.
    template <int MT, int N>
    __device__ __forceinline__ void mask(f32 (&x)[MT][N / 8][4], const Problem& p, i32 key, i32 row, i32 mine) const {
        if (key + BN > p.s || (CAUSAL && key + BN - 1 > top) || (WINDOW && key <= top + ROWS - 1 - p.window))
            apply_mask<CAUSAL, WINDOW, MT, N>(x, row + keys.shift, mine, p.s, p.window);
        if constexpr (D::ON)
            if (key < near.z || key + BN > near.w) ids.template apply_mask<MT, N>(x, row, mine, -infinity());
    }
};

// Rows are keys.
template <int BM, int BN, int ROWS, bool CAUSAL, bool WINDOW, typename D, typename B = AllKeys>
struct QueryRange : MaskRange<BM, BN, D> {
    using MaskRange<BM, BN, D>::begin, MaskRange<BM, BN, D>::end, MaskRange<BM, BN, D>::top, MaskRange<BM, BN, D>::near, MaskRange<BM, BN, D>::ids;

    B keys;

    __device__ __forceinline__ QueryRange(
        const Problem& p, const D& segments, i32 batch, i32 first, i32 top_, const B& keys_ = {})
        : keys(keys_) {
        top = top_ - keys.shift;
        const i32 last = min(first + BM, p.s) - 1 - keys.shift, from = first - keys.shift;
        // Keys that no query comes before have negative positions.
        begin = CAUSAL ? (B::BLOCK ? max(from, 0) : from) / BN * BN : 0;
        end = WINDOW ? (i32)min((i64)p.t, (i64)last + p.window) : p.t;
        this->clamp_to_segments(segments, batch, p.s, first, top_);
    }
    // Whether any row of the group is visible to any query of the tile.
    __device__ __forceinline__ bool sees(const Problem& p, i32 query) const {
        return (!CAUSAL || query + BN - 1 >= top) && (!WINDOW || query - p.window < top + ROWS - 1) &&
               (!D::ON || (query < near.y && query + BN > near.x));
    }
    // Sets the weights of keys that a query may not attend to to 0: 16 MT of the group's rows starting at `row`, N
    // queries of the tile starting at `mine`. Only masks need this: queries past the end have grad 0, and keys past the
    // end are not stored.
    template <int MT, int N>
    __device__ __forceinline__ void mask(f32 (&x)[MT][N / 8][4], const Problem& p, i32 query, i32 row, i32 mine) const {
        if ((CAUSAL && query < top + ROWS - 1) || (WINDOW && query + BN - 1 - p.window >= top)) {
            const i32 tid = read_tid(), r0 = row - keys.shift + tid % 32 / 4, c0 = mine + tid % 4 * 2;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < N / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const i32 r = r0 + m * 16 + i / 2 * 8, c = c0 + j * 8 + (i & 1);
                        const bool seen = (!CAUSAL || r <= c) && (!WINDOW || r > c - p.window);
                        x[m][j][i] = seen ? x[m][j][i] : 0.0f;
                    }
        }
        if constexpr (D::ON)
            if (query < near.z || query + BN > near.w) ids.template apply_mask<MT, N>(x, row, mine, 0.0f);
    }
};

}  // namespace attention
