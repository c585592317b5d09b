// Sorts long rows by a stable least-significant-digit radix sort with 8 bits per pass.
//
// Keys are unsigned; a pass orders (key, position) pairs by one digit in three launches. `radix_count` counts the
// digits of each tile of 256 * ITEMS pairs (short lists have fewer ITEMS, so that all multiprocessors have work);
// `radix_scan` turns the counts of each digit into exclusive prefix sums over the tiles; `radix_place` ranks the pairs
// of a tile and writes them. Ranks: each of 8 warps takes ITEMS strips of 32 adjacent pairs in order; lanes with equal
// digits find each other by ballots, so equal digits keep their order. Pairs go through shared memory to be written in
// runs. Several rows of one length are sorted at once: block (row, tile).
//
// Shared memory of radix_place: 8 KiB of warp counts, 10 KiB to 32 KiB of pairs. Limited by device memory: a pass reads keys twice and
// positions once, and writes both. Merrill and Grimshaw, "High performance and scalable radix sorting" (2011), with ranks as in Adinets
// and Merrill, "Onesweep" (2022).
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

constexpr u32 RADIX = 256;

// Keys of all rows of x, each row contiguous. `strided` over rows: (x).
template <typename T, typename Strided>
__device__ __forceinline__ void row_keys(const T* __restrict__ x, typename SortKey<T>::Key* __restrict__ keys,
                                         const Strided& strided, i64 n, i64 step, bool descending) {
    u32 blocks = (u32)((n + blockDim.x - 1) / blockDim.x), row = blockIdx.x / blocks;
    u32 i = (blockIdx.x - row * blocks) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    typename Strided::Offset at[1];
    strided.offsets(row, at);
    typename SortKey<T>::Key key = SortKey<T>::key(x[at[0] + i * step]);
    keys[(u64)row * n + i] = descending ? key ^ SortKey<T>::LAST : key;
}

// counts: (rows, RADIX, stride), one column per tile.
template <typename Key, int ITEMS>
__device__ __forceinline__ void radix_count(const Key* __restrict__ keys, u32* __restrict__ counts, u32 n, u32 tiles,
                                            u32 stride, u32 shift) {
    __shared__ u32 found[RADIX];
    found[threadIdx.x] = 0;
    __syncthreads();
    u32 row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
    keys += (u64)row * n;
    u32 first = tile * (RADIX * ITEMS) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        u32 p = first + i * RADIX;
        if (p < n) atomicAdd(&found[(u32)(keys[p] >> shift) & (RADIX - 1)], 1u);
    }
    __syncthreads();
    counts[((u64)row * RADIX + threadIdx.x) * stride + tile] = found[threadIdx.x];
}

// One warp for each (row, digit): replaces its counts by their exclusive prefix sums; totals: (rows, RADIX).
__device__ __forceinline__ void radix_scan(u32* __restrict__ counts, u32* __restrict__ totals, i64 lists, u32 tiles,
                                           u32 stride) {
    u64 list = global_thread<u64>() / 32;
    u32 lane = threadIdx.x % 32;
    if (list >= (u64)lists) return;
    u32* row = counts + list * stride;
    u32 carry = 0;
    for (u32 base = 0; base < tiles; base += 128) {
        u32 x[4], sum = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 at = base + lane * 4 + k;
            x[k] = at < tiles ? row[at] : 0;
            sum += x[k];
        }
        u32 scan = sum;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            u32 left = __shfl_up_sync(~0u, scan, d);
            if (lane >= d) scan += left;
        }
        u32 before = carry + scan - sum;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 at = base + lane * 4 + k;
            if (at < tiles) row[at] = before;
            before += x[k];
        }
        carry += __shfl_sync(~0u, scan, 31);
    }
    if (lane == 0) totals[list] = carry;
}

// The sum of `x` over the threads before this one; 256 threads, 8 words of shared memory.
__device__ __forceinline__ u32 sum_before(u32 x, u32* shared) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, scan = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        u32 left = __shfl_up_sync(~0u, scan, d);
        if (lane >= d) scan += left;
    }
    if (lane == 31) shared[warp] = scan;
    __syncthreads();
    u32 before = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) before += w < warp ? shared[w] : 0;
    __syncthreads();
    return before + scan - x;
}

// Tuning of radix_place's registers, according to ptxas's allocation on each architecture. PLACE_BLOCKS: blocks that
// should fit on a multiprocessor; three hide more latency than two. Held: the type that holds a key; PACKED: whether it
// also holds the key's rank.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int PLACE_BLOCKS = 2;
#else
constexpr int PLACE_BLOCKS = 3;
#endif
template <typename Key>
struct Held {
    using Type = Key;
    static constexpr bool PACKED = false;
};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <>
struct Held<u8> {
    using Type = u32;
    static constexpr bool PACKED = true;
};
template <>
struct Held<u16> : Held<u8> {};
#endif

// FIRST: positions are the indices of the keys. LAST: only positions are stored, as i64 at (outer, n, inner).
template <typename Key, int ITEMS, bool FIRST, bool LAST>
__device__ __forceinline__ void radix_place(const Key* __restrict__ keys, const u32* __restrict__ order,
                                            Key* __restrict__ keys_out, u32* __restrict__ order_out,
                                            i64* __restrict__ out, const u32* __restrict__ counts,
                                            const u32* __restrict__ totals, u32 n, u32 tiles, u32 stride, u32 shift,
                                            i64 inner) {
    constexpr u32 TILE = RADIX * ITEMS;
    __shared__ u32 found[8][RADIX];  // per warp: counts of digits, then ranks of the first of each
    __shared__ Key key_at[TILE];
    __shared__ u32 order_at[TILE];
    __shared__ u32 to[RADIX];  // destination of the tile's first pair of a digit, less its rank in the tile
    __shared__ u32 sums[8];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x;
    u64 row = blockIdx.x / tiles;
    u32 column = blockIdx.x - (u32)row * tiles;
    keys += row * n;
    if (!FIRST) order += row * n;
    u32 tile = column * TILE, size = n - tile < TILE ? n - tile : TILE;

    typename Held<Key>::Type key[ITEMS];
    constexpr bool PACKED = Held<Key>::PACKED;
    static_assert(TILE <= 1 << 16);
    u32 rank[PACKED ? 1 : ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        u32 p = (warp * ITEMS + i) * 32 + lane;
        // Past the end: the largest digit, after all others.
        key[i] = p < size ? keys[tile + p] : (Key)~(Key)0;
    }
    u32 total = totals[row * RADIX + t];
    u32 earlier = counts[(row * RADIX + t) * stride + column];
#pragma unroll
    for (int w = 0; w < 8; w++) found[w][t] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        u32 digit = (u32)(key[i] >> shift) & (RADIX - 1);
        u32 peers = ~0u;
#pragma unroll
        for (int b = 0; b < 8; b++) {
            bool bit = digit >> b & 1;
            u32 set = __ballot_sync(~0u, bit);
            peers &= bit ? set : ~set;
        }
        u32 before = __popc(peers & ((1u << lane) - 1));
        u32 base = found[warp][digit];
        __syncwarp();
        if (before == 0) found[warp][digit] = base + __popc(peers);
        __syncwarp();
        if constexpr (PACKED) {
            key[i] |= (base + before) << 16;
        } else {
            rank[i] = base + before;
        }
    }
    __syncthreads();
    // Thread t handles digit t.
    u32 here = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) here += found[w][t];
    u32 start = sum_before(here, sums), whole = sum_before(total, sums);
    to[t] = whole + earlier - start;
#pragma unroll
    for (int w = 0; w < 8; w++) {
        u32 c = found[w][t];
        found[w][t] = start;
        start += c;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        u32 p = (warp * ITEMS + i) * 32 + lane;
        u32 r = found[warp][(u32)(key[i] >> shift) & (RADIX - 1)];
        if constexpr (PACKED) {
            r += key[i] >> 16;
        } else {
            r += rank[i];
        }
        key_at[r] = (Key)key[i];
        if (p < size) order_at[r] = FIRST ? tile + p : order[tile + p];
    }
    __syncthreads();
    u64 outer = (u32)row / (u32)inner;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        u32 r = i * RADIX + t;
        if (r >= size) break;
        Key k = key_at[r];
        u64 p = to[(u32)(k >> shift) & (RADIX - 1)] + r;
        if (LAST) {
            out[(outer * n + p) * inner + (row - outer * inner)] = order_at[r];
        } else {
            keys_out[row * n + p] = k;
            order_out[row * n + p] = order_at[r];
        }
    }
}

// Blocks of radix_row that should fit on a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int ROW_BLOCKS = 3;
#else
constexpr int ROW_BLOCKS = 2;
#endif

// argsort of rows of at most 256 * ITEMS elements, one block per row: all passes run in shared memory, with the ranks
// of `radix_place`. `strided` over rows: (x); out of shape (outer, n, inner); `bits` significant bits of a key. Shared
// memory: 8 KiB of warp counts and 6 bytes per pair (10 for 64-bit elements). Limited by instructions: about 55 for
// each pair and digit.
template <typename T, int ITEMS, typename Strided>
__device__ __forceinline__ void radix_row(const T* __restrict__ x, i64* __restrict__ out, const Strided& strided, u32 n, i64 step,
                                          i64 inner, bool descending, u32 bits) {
    typedef typename SortKey<T>::Key Key;
    constexpr u32 TILE = RADIX * ITEMS;
    static_assert(TILE <= 1 << 16);
    __shared__ u32 found[8][RADIX];
    __shared__ Key key_at[TILE];
    __shared__ u16 order_at[TILE];
    __shared__ u32 sums[8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x;
    typename Strided::Offset from[1];
    strided.offsets((typename Strided::Index)blockIdx.x, from);
    Key key[ITEMS];
    u32 order[ITEMS];  // and, in the upper half, the rank among its warp's pairs with that digit
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const u32 p = (warp * ITEMS + i) * 32 + lane;
        // Past the end: the largest key, after all others.
        key[i] = (Key)~(Key)0;
        if (p < n) {
            key[i] = SortKey<T>::key(x[from[0] + p * step]);
            if (descending) key[i] = key[i] ^ SortKey<T>::LAST;
        }
        order[i] = p;
    }
#pragma unroll 1
    for (u32 shift = 0;; shift += 8) {
#pragma unroll
        for (int w = 0; w < 8; w++) found[w][t] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const u32 digit = (u32)(key[i] >> shift) & (RADIX - 1);
            u32 peers = ~0u;
#pragma unroll
            for (int b = 0; b < 8; b++) {
                const bool bit = digit >> b & 1;
                const u32 set = __ballot_sync(~0u, bit);
                peers &= bit ? set : ~set;
            }
            const u32 before = __popc(peers & ((1u << lane) - 1)), base = found[warp][digit];
            __syncwarp();
            if (before == 0) found[warp][digit] = base + __popc(peers);
            __syncwarp();
            order[i] |= (base + before) << 16;
        }
        __syncthreads();
        // Thread t handles digit t.
        u32 here = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) here += found[w][t];
        u32 start = sum_before(here, sums);
#pragma unroll
        for (int w = 0; w < 8; w++) {
            const u32 c = found[w][t];
            found[w][t] = start;
            start += c;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const u32 r = found[warp][(u32)(key[i] >> shift) & (RADIX - 1)] + (order[i] >> 16);
            key_at[r] = key[i];
            order_at[r] = (u16)order[i];
        }
        __syncthreads();
        if (shift + 8 >= bits) break;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const u32 p = (warp * ITEMS + i) * 32 + lane;
            key[i] = key_at[p];
            order[i] = order_at[p];
        }
    }
    const u64 outer = blockIdx.x / (u32)inner, side = blockIdx.x - outer * (u32)inner;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const u32 r = i * RADIX + t;
        if (r < n) out[(outer * n + r) * inner + side] = order_at[r];
    }
}

}  // namespace library
