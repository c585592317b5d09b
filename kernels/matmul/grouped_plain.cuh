// Computes grouped matrix products without tensor cores: f32, f64, integers, and 16-bit floats whose row strides are
// too long for the other kernels.
//
// Shapes as in grouped.cuh, operands through any strides; tiles, sums and limits as in plain.cuh.
#pragma once
#include "matmul/groups.cuh"
#include "matmul/plain.cuh"

namespace library {

// `p.m` is T; a_row and a_col belong to x, b_row and b_col to one matrix of w.
template <typename T>
__device__ __forceinline__ void grouped_rows_plain(const T* x, const T* w, const i64* ends, T* out, const GroupEnds& e, Product p,
                                                   i64 matrix, Fault* fault) {
    if (blockIdx.x == 0) check_ends(ends, e, fault);
    const u32 tile = blockIdx.x / (u32)p.tiles_n;
    const i64 col = (i64)(blockIdx.x - tile * (u32)p.tiles_n) * PLAIN_SIDE;
    const RowRange at = find_tile<PLAIN_SIDE>(ends, e, (i32)tile);
    if (at.group == -2) return;
    p.m = at.last;
    if (at.group < 0) p.k = 0;
    typename Numeric<T>::Acc sum[4][4];
    product_sums(sum, x, w + (at.group < 0 ? 0 : at.group) * matrix, p, at.first, col);
    product_store<T>(sum, out, p, at.first, col, nullptr);
}

// `p.k` is T; a_row and a_col belong to the transpose of a, so a_col is the row stride of a.
template <typename T>
__device__ __forceinline__ void grouped_sums_plain(const T* a, const T* b, const i64* ends, T* out, const GroupEnds& e, Product p,
                                                   Fault* fault) {
    if (blockIdx.x == 0) check_ends(ends, e, fault);
    const u32 above = blockIdx.x / (u32)p.tiles_n, group = above / (u32)p.tiles_m;
    const i64 col = (i64)(blockIdx.x - above * (u32)p.tiles_n) * PLAIN_SIDE;
    const i64 row = (i64)(above - group * (u32)p.tiles_m) * PLAIN_SIDE;
    const RowRange at = group_rows(ends, e, (i32)group);
    p.k = at.last - at.first;
    typename Numeric<T>::Acc sum[4][4];
    product_sums(sum, a + at.first * p.a_col, b + at.first * p.b_row, p, row, col);
    product_store<T>(sum, out + (i64)group * p.m * p.n, p, row, col, nullptr);
}

}  // namespace library
