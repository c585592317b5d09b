// Computes cumsum and cumprod: an inclusive scan along an axis.
//
// Mapping: a unit is (chunk of a row, row); GROUP threads scan it from its start. GROUP 1: rows are short or adjacent
// in memory; elements combine one by one in Acc, as on the CPU. GROUP 32 or 256: a step takes STRIPS strips of 32 * V
// elements per warp, each scanned by shuffles; strips, warps and steps combine in Sum. Few long rows are split into
// chunks: `scan_totals` reduces each chunk, shape (chunks, rows), then every chunk starts from the combined totals
// before it, in a fixed order.
//
// Shared memory: one Sum per warp. Limited by device memory: x is read once, or twice if rows are split, and the result
// is written once. Reduce-then-scan as in Merrill and Garland, "Single-pass parallel prefix scan with decoupled
// look-back" (2016), section 3; look-back itself is not used because its order of additions is not fixed.
#pragma once
#include "library/numeric_traits.cuh"
#include "library/strided.cuh"

namespace library {

// `Local`: the type in which adjacent elements are combined before they are combined with the rest of their row. A
// product that overflows f32 must not meet a running product that underflowed (or vice versa), so adjacent
// elements are combined in f64.
struct Plus {
    template <typename T>
    using Local = typename Numeric<T>::Acc;
    template <typename A>
    static __device__ __forceinline__ A combine(A a, A b) {
        return a + b;
    }
    static constexpr int IDENTITY = 0;
};
struct Times {
    template <typename T>
    using Local = typename Numeric<T>::Sum;
    template <typename A>
    static __device__ __forceinline__ A combine(A a, A b) {
        return a * b;
    }
    static constexpr int IDENTITY = 1;
};

constexpr int STRIPS = 4;

// The inclusive scan of `x` over the lanes of a warp.
template <typename Op, typename A>
__device__ __forceinline__ A warp_scan(A x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        A left = __shfl_up_sync(~0u, x, d);
        if (threadIdx.x % 32 >= d) x = Op::combine(left, x);
    }
    return x;
}

// Loads V elements starting at `i`, with the identity past `end`. VX: they are one aligned vector.
template <typename T, typename Op, int V, bool VX>
__device__ __forceinline__ void load(typename Op::template Local<T> (&x)[V], const T* from, i64 i, i64 end, i64 step) {
    if (VX && i + V <= end) {
        Vec<T, V> p = load_vec<T, V>(from + i);
#pragma unroll
        for (int v = 0; v < V; v++) x[v] = Numeric<T>::widen(p.at[v]);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++) {
            x[v] = i + v < end ? Numeric<T>::widen(from[(i + v) * step]) : (typename Op::template Local<T>)Op::IDENTITY;
        }
    }
}

// totals: (chunks, rows). `strided` over rows: (x, out). The last chunk's total is not needed.
template <typename T, typename Op, int GROUP, int V, bool VX, typename Strided>
__device__ __forceinline__ void scan_totals(const T* __restrict__ x, typename Numeric<T>::Sum* __restrict__ totals,
                                            const Strided& strided, i64 rows, i64 n, i64 step, i64 chunks, i64 chunk) {
    typedef typename Numeric<T>::Acc Acc;
    typedef typename Numeric<T>::Sum Sum;
    typedef typename Op::template Local<T> Local;
    u64 unit = global_thread<u64>() / GROUP;
    u32 lane = threadIdx.x % GROUP;
    if (unit >= (u64)(rows * (chunks - 1))) return;
    // Rows are split only if there are few.
    u64 c = chunks == 1 ? 0 : (u32)unit / (u32)rows, row = unit - c * rows;
    typename Strided::Offset at[2];
    strided.offsets((typename Strided::Index)row, at);
    const T* from = x + at[0];
    i64 start = (i64)c * chunk, end = start + chunk;
    Sum total = (Sum)Op::IDENTITY;
    if (GROUP == 1) {
        Acc sum = (Acc)Op::IDENTITY;
#pragma unroll 8
        for (i64 i = start; i < end; i++) sum = Op::combine(sum, Numeric<T>::widen(from[i * step]));
        totals[unit] = (Sum)sum;
        return;
    }
    for (i64 i = start + lane * V; i < end; i += GROUP * V * STRIPS) {
        Local v[STRIPS][V];
#pragma unroll
        for (int s = 0; s < STRIPS; s++) load<T, Op, V, VX>(v[s], from, i + s * GROUP * V, end, step);
        Local sum = v[0][0];
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
#pragma unroll
            for (int k = s == 0; k < V; k++) sum = Op::combine(sum, v[s][k]);
        }
        total = Op::combine(total, (Sum)sum);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        Sum right = __shfl_down_sync(~0u, total, d);
        total = Op::combine(total, right);
    }
    if (GROUP > 32) {
        __shared__ Sum shared[8];
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < 8; w++) total = Op::combine(total, shared[w]);
        }
    }
    if (lane == 0) totals[unit] = total;
}

// Combines the totals of the chunks before c, in all threads of the group.
template <typename Op, int GROUP, typename Sum>
__device__ __forceinline__ Sum totals_before(const Sum* __restrict__ totals, u64 c, u64 row, i64 rows, Sum* shared) {
    u32 lane = threadIdx.x % GROUP;
    Sum carry = (Sum)Op::IDENTITY;
    for (u64 k = lane; k < c; k += GROUP) carry = Op::combine(carry, totals[k * rows + row]);
    if (GROUP > 1) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            Sum other = __shfl_xor_sync(~0u, carry, d);
            carry = Op::combine(carry, other);
        }
    }
    if (GROUP > 32) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = carry;
        __syncthreads();
        carry = shared[0];
        for (int w = 1; w < 8; w++) carry = Op::combine(carry, shared[w]);
        __syncthreads();
    }
    return carry;
}

// `strided` over rows: (x, out); elements of a row are `step` apart in x and `out_step` in out.
template <typename T, typename Op, int GROUP, int V, bool VX, bool VO, typename Strided>
__device__ __forceinline__ void scan_rows(const T* __restrict__ x, T* __restrict__ out,
                                          const typename Numeric<T>::Sum* __restrict__ totals, const Strided& strided, i64 rows,
                                          i64 n, i64 step, i64 out_step, i64 chunks, i64 chunk) {
    typedef typename Numeric<T>::Acc Acc;
    typedef typename Numeric<T>::Sum Sum;
    typedef typename Op::template Local<T> Local;
    __shared__ Sum shared[8];
    u64 unit = global_thread<u64>() / GROUP;
    u32 lane = threadIdx.x % GROUP;
    if (unit >= (u64)(rows * chunks)) return;
    // Rows are split only if there are few.
    u64 c = chunks == 1 ? 0 : (u32)unit / (u32)rows, row = unit - c * rows;
    typename Strided::Offset at[2];
    strided.offsets((typename Strided::Index)row, at);
    const T* from = x + at[0];
    T* to = out + at[1];
    i64 start = (i64)c * chunk, end = start + chunk < n ? start + chunk : n;
    Sum carry = totals_before<Op, GROUP>(totals, c, row, rows, shared);
    if (GROUP == 1) {
        Acc total = (Acc)carry;
        i64 i = start;
        // Eight loads in flight; the combinations stay in order.
        for (; i + 8 <= end; i += 8) {
            Acc v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = Numeric<T>::widen(from[(i + k) * step]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                total = Op::combine(total, v[k]);
                to[(i + k) * out_step] = Numeric<T>::narrow(total);
            }
        }
        for (; i < end; i++) {
            total = Op::combine(total, Numeric<T>::widen(from[i * step]));
            to[i * out_step] = Numeric<T>::narrow(total);
        }
        return;
    }
    constexpr i64 STRIP = 32 * V;
    constexpr i64 STEP = (i64)GROUP * V * STRIPS;
    u32 warp = threadIdx.x % GROUP / 32, l = threadIdx.x % 32;
    for (i64 base = start; base < end; base += STEP) {
        i64 first = base + warp * (STRIP * STRIPS) + l * V;
        Local v[STRIPS][V], before[STRIPS];
        Sum strip[STRIPS];
#pragma unroll
        for (int s = 0; s < STRIPS; s++) load<T, Op, V, VX>(v[s], from, first + s * STRIP, end, step);
        Sum sum = (Sum)Op::IDENTITY;
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
#pragma unroll
            for (int k = 1; k < V; k++) v[s][k] = Op::combine(v[s][k - 1], v[s][k]);
            Local scan = warp_scan<Op>(v[s][V - 1]);
            Local left = __shfl_up_sync(~0u, scan, 1);
            before[s] = l > 0 ? left : (Local)Op::IDENTITY;
            strip[s] = sum;
            sum = Op::combine(sum, (Sum)__shfl_sync(~0u, scan, 31));
        }
        Sum mine = carry;
        if (GROUP > 32) {
            if (l == 31) shared[warp] = sum;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < 8; w++) {
                if (w < warp) mine = Op::combine(mine, shared[w]);
                carry = Op::combine(carry, shared[w]);
            }
            __syncthreads();
        } else {
            carry = Op::combine(carry, sum);
        }
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            Sum lead = Op::combine(Op::combine(mine, strip[s]), (Sum)before[s]);
            i64 i = first + s * STRIP;
            Vec<T, V> p;
#pragma unroll
            for (int k = 0; k < V; k++) p.at[k] = Numeric<T>::narrow((Acc)Op::combine(lead, (Sum)v[s][k]));
            if (VO && i + V <= end) {
                store_vec<T, V>(to + i, p);
            } else {
#pragma unroll
                for (int k = 0; k < V; k++) {
                    if (i + k < end) to[(i + k) * out_step] = p.at[k];
                }
            }
        }
    }
}

}  // namespace library
