// Reduces in the order that all generated kernels share, independent of their strategy
// (runtime/cuda/src/schedule/reduction_order.rs defines it).
//
// 32 lanes hold a block of 256 adjacent elements, 8 elements each: 8 / V vectors of `V` adjacent elements, 32 * V
// apart. Element s of a block is always combined with its partners in the same order of the bits of s (`ORDER`), so the
// result does not depend on V: a bit is reduced within a thread or by a shuffle, depending on V. Rows of fewer than 256
// elements use G lanes; the higher bits, which would only combine with the identity, are skipped.
#pragma once
#include "device/base.cuh"
#include "device/vec.cuh"

#define FN __device__ __forceinline__

namespace region {

FN f32 max_nan(f32 a, f32 b) {
    f32 c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
FN f32 min_nan(f32 a, f32 b) {
    f32 c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
// The choice between +0 and -0 must not depend on the order of operands.
FN f64 max_nan(f64 a, f64 b) {
    if (a != a || b != b) return __longlong_as_double(0x7ff8000000000000);
    if (a == b) return __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
    return a > b ? a : b;
}
FN f64 min_nan(f64 a, f64 b) {
    if (a != a || b != b) return __longlong_as_double(0x7ff8000000000000);
    if (a == b) return __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
    return a < b ? a : b;
}
FN i64 max_nan(i64 a, i64 b) { return a > b ? a : b; }
FN i64 min_nan(i64 a, i64 b) { return a < b ? a : b; }
FN i32 max_nan(i32 a, i32 b) { return a > b ? a : b; }
FN i32 min_nan(i32 a, i32 b) { return a < b ? a : b; }
FN u8 max_nan(u8 a, u8 b) { return a > b ? a : b; }
FN u8 min_nan(u8 a, u8 b) { return a < b ? a : b; }

FN f32 plus(f32 a, f32 b) { return a + b; }
FN f64 plus(f64 a, f64 b) { return a + b; }
FN i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
FN i32 plus(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
FN u8 plus(u8 a, u8 b) { return (u8)(a + b); }
FN f32 times(f32 a, f32 b) { return a * b; }
FN f64 times(f64 a, f64 b) { return a * b; }
FN i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
FN i32 times(i32 a, i32 b) { return (i32)((u32)a * (u32)b); }
FN u8 times(u8 a, u8 b) { return (u8)(a * b); }

// EXACT: no result is rounded, so none needs a wider type for intermediate results.
struct Sum {
    static constexpr bool EXACT = false;
    template <class T> FN static T combine(T a, T b) { return plus(a, b); }
};
struct Prod {
    static constexpr bool EXACT = false;
    template <class T> FN static T combine(T a, T b) { return times(a, b); }
};
struct Max {
    static constexpr bool EXACT = true;
    template <class T> FN static T combine(T a, T b) { return max_nan(a, b); }
};
struct Min {
    static constexpr bool EXACT = true;
    template <class T> FN static T combine(T a, T b) { return min_nan(a, b); }
};

template <class T> FN T shfl_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
template <> FN u8 shfl_xor<u8>(u8 x, int mask) { return (u8)__shfl_xor_sync(0xffffffffu, (int)x, mask); }
template <class T> FN T shfl_first(T x) { return __shfl_sync(0xffffffffu, x, 0); }
template <> FN u8 shfl_first<u8>(u8 x) { return (u8)__shfl_sync(0xffffffffu, (int)x, 0); }

// Bits of an element's position in its block, in the order in which they are folded, from the lowest digit on.
constexpr u32 ORDER = 0x43562710;

// Reduces the 8 partial results of each of G lanes (32 / G rows side by side in a warp) to one, known to all of them.
// All lanes of the warp must take part.
template <class R, int V, int G, class T>
FN T reduce_lanes(T (&a)[8]) {
    constexpr int LV = V == 8 ? 3 : V == 4 ? 2 : V == 2 ? 1 : 0;
    constexpr int LG = G == 32 ? 5 : G == 16 ? 4 : G == 8 ? 3 : G == 4 ? 2 : G == 2 ? 1 : 0;
    int done = 0;
#pragma unroll
    for (int s = 0; s < 8; s++) {
        const int b = (ORDER >> (4 * s)) & 15;
        if (b >= 3 + LG) continue;
        if (b >= LV && b < LV + LG) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (!(k & done)) a[k] = R::combine(a[k], shfl_xor(a[k], 1 << (b - LV)));
            }
        } else {
            const int m = 1 << (b < LV ? b : b - LG);
            done |= m;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (!(k & done)) a[k] = R::combine(a[k], a[k | m]);
            }
        }
    }
    return a[0];
}

// Reduces one partial of each of W warps (a power of two, at most 8) in a balanced tree. `part` belongs to this row and
// reduction.
template <class R, int W, class T>
FN T reduce_warps(const T* part) {
    T t[W];
#pragma unroll
    for (int w = 0; w < W; w++) t[w] = part[w];
#pragma unroll
    for (int m = 1; m < W; m *= 2) {
#pragma unroll
        for (int w = 0; w + m < W; w += 2 * m) t[w] = R::combine(t[w], t[w + m]);
    }
    return t[0];
}

// The type in which partial results of chunks are combined.
template <class T> struct Wide { typedef T type; };
template <> struct Wide<f32> { typedef f64 type; };
template <class T> FN constexpr bool is_f32() { return false; }
template <> FN constexpr bool is_f32<f32>() { return true; }

// Reduces one total of each of 256 threads to one, known to all: bits from the lowest on. `part`: 8 cells that are not
// in use.
template <class R, class T>
FN T reduce_strips(T x, T* part) {
#pragma unroll
    for (int m = 1; m < 32; m *= 2) x = R::combine(x, shfl_xor(x, m));
    if (threadIdx.x % 32 == 0 && threadIdx.x < 256) part[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_warps<R, 8>(part);
}

// The same if only the first M <= 32 strips are occupied. Each of them is a chunk, of which `part` holds a partial of
// each of its 8 warps. The result is known to all, and each warp computes it separately.
template <class R, int M, class T>
FN T reduce_chunks(const T* part, T identity) {
    const u32 lane = threadIdx.x % 32;
    const bool mine = lane < M;
    const T own = mine ? reduce_warps<R, 8>(part + 8 * lane) : identity;
    if constexpr (R::EXACT) {
        T x = own;
#pragma unroll
        for (int m = 1; m < M; m *= 2) x = R::combine(x, shfl_xor(x, m));
        // The NaN that combining in the wider type yields.
        if constexpr (is_f32<T>()) x = x != x ? __uint_as_float(0x7fc00000u) : x;
        return shfl_first(x);
    } else {
        typedef typename Wide<T>::type W;
        W x = mine ? R::combine((W)identity, (W)own) : (W)identity;
#pragma unroll
        for (int m = 1; m < M; m *= 2) x = R::combine(x, shfl_xor(x, m));
        return shfl_first((T)x);
    }
}

// The same for a reduction without rounding; `part` holds a partial of each of N <= 32 warps.
template <class R, int N, class T>
FN T reduce_exact(const T* part, T identity) {
    const u32 lane = threadIdx.x % 32;
    T x = lane < N ? part[lane] : identity;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) x = R::combine(x, shfl_xor(x, m));
    if constexpr (is_f32<T>()) x = x != x ? __uint_as_float(0x7fc00000u) : x;
    return x;
}

// Computes maxima and minima of 16-bit floats two at a time; they are exact, so the order does not matter.
template <class R, class S> struct Half2;
#define HALF2(R, S, op, infinity)                                                                        \
    template <> struct Half2<R, S> {                                                                     \
        static constexpr u32 IDENTITY = infinity;                                                       \
        FN static u32 combine(u32 a, u32 b) {                                                              \
            u32 c;                                                                                      \
            asm(op : "=r"(c) : "r"(a), "r"(b));                                                         \
            return c;                                                                                   \
        }                                                                                               \
    };
HALF2(Max, bf16, "max.NaN.bf16x2 %0, %1, %2;", 0xff80ff80u)
HALF2(Min, bf16, "min.NaN.bf16x2 %0, %1, %2;", 0x7f807f80u)
HALF2(Max, f16, "max.NaN.f16x2 %0, %1, %2;", 0xfc00fc00u)
HALF2(Min, f16, "min.NaN.f16x2 %0, %1, %2;", 0x7c007c00u)
#undef HALF2

template <class R, class S>
FN void half2_init(u32 (&a)[4], const S*) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = Half2<R, S>::IDENTITY;
}
// Combines the V elements of `w`, as pack `k` of a thread.
template <class R, int V, class S>
FN void half2_combine_words(u32 (&a)[4], const u32* w, const S*, int k) {
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        u32& to = a[(k * (V / 2) + i) % 4];
        to = Half2<R, S>::combine(to, w[i]);
    }
}
// The same if only `left` elements remain; `left` may exceed V.
template <class R, int V, class S, class I>
FN void half2_combine_words(u32 (&a)[4], const u32* w, const S* p, int k, I left) {
    const u32 id = Half2<R, S>::IDENTITY;
    u32 some[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
        some[i] = 2 * i + 1 < left ? w[i] : 2 * i < left ? (w[i] & 0xffff) | (id & 0xffff0000) : id;
    }
    half2_combine_words<R, V>(a, some, p, k);
}
// The same for the elements at `p`.
template <class R, int V, class S, class... I>
FN void half2_combine(u32 (&a)[4], const S* p, int k, I... left) {
    u32 w[V / 2];
    load_words<2 * V, false>(w, p);
    half2_combine_words<R, V>(a, w, p, k, left...);
}
template <class S>
FN void half2_finish(f32 (&x)[8], const u32 (&a)[4], const S* p) {
#pragma unroll
    for (int i = 0; i < 8; i++) unpack(x[i], a, i, p);
}

}  // namespace region

#undef FN
