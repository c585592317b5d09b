// Defines the arithmetic and the ordering of each element type.
//
// `Acc` is the type in which additions run, `Sum` the one that combines partial results: f64 for all floats. Integers
// wrap, so both are unsigned.
#pragma once
#include "device/base.cuh"

namespace library {

template <typename T>
struct Numeric;

template <>
struct Numeric<f64> {
    typedef f64 Acc;
    typedef f64 Sum;
    static __device__ __forceinline__ f64 widen(f64 x) { return x; }
    static __device__ __forceinline__ f64 narrow(f64 x) { return x; }
};
template <>
struct Numeric<f32> {
    typedef f32 Acc;
    typedef f64 Sum;
    static __device__ __forceinline__ f32 widen(f32 x) { return x; }
    static __device__ __forceinline__ f32 narrow(f32 x) { return x; }
};
template <>
struct Numeric<bf16> {
    typedef f32 Acc;
    typedef f64 Sum;
    static __device__ __forceinline__ f32 widen(bf16 x) { return to_f32(x); }
    static __device__ __forceinline__ bf16 narrow(f32 x) { return to_bf16(x); }
};
template <>
struct Numeric<f16> {
    typedef f32 Acc;
    typedef f64 Sum;
    static __device__ __forceinline__ f32 widen(f16 x) { return to_f32(x); }
    static __device__ __forceinline__ f16 narrow(f32 x) { return to_f16(x); }
};
template <>
struct Numeric<i64> {
    typedef u64 Acc;
    typedef u64 Sum;
    static __device__ __forceinline__ u64 widen(i64 x) { return (u64)x; }
    static __device__ __forceinline__ i64 narrow(u64 x) { return (i64)x; }
};
template <>
struct Numeric<i32> {
    typedef u32 Acc;
    typedef u32 Sum;
    static __device__ __forceinline__ u32 widen(i32 x) { return (u32)x; }
    static __device__ __forceinline__ i32 narrow(u32 x) { return (i32)x; }
};
template <>
struct Numeric<u8> {
    typedef u32 Acc;
    typedef u32 Sum;
    static __device__ __forceinline__ u32 widen(u8 x) { return x; }
    static __device__ __forceinline__ u8 narrow(u32 x) { return (u8)x; }
};

// Keys whose unsigned order is the order of elements: both zeros are equal, and every NaN has the largest key.
template <typename T>
struct SortKey;

template <typename U>
__device__ __forceinline__ U flipped(U bits, U sign) {
    return bits & sign ? (U)~bits : (U)(bits | sign);
}

template <>
struct SortKey<f32> {
    typedef u32 Key;
    static constexpr bool FLOAT = true;
    static constexpr u32 LAST = 0xFFFFFFFFu;
    static __device__ __forceinline__ u32 key(f32 x) {
        if (x != x) return LAST;
        return flipped<u32>(x == 0.0f ? 0u : __float_as_uint(x), 0x80000000u);
    }
};
template <>
struct SortKey<f64> {
    typedef u64 Key;
    static constexpr bool FLOAT = true;
    static constexpr u64 LAST = ~0ull;
    static __device__ __forceinline__ u64 key(f64 x) {
        if (x != x) return LAST;
        return flipped<u64>(x == 0.0 ? 0ull : (u64)__double_as_longlong(x), 1ull << 63);
    }
};
// 16-bit floats: keys of 16 bits.
__device__ __forceinline__ u32 half_key(u32 bits, u32 infinity) {
    u32 size = bits & 0x7FFFu;
    if (size > infinity) return 0xFFFFu;
    if (size == 0) return 0x8000u;
    return bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
}
template <>
struct SortKey<bf16> {
    typedef u32 Key;
    static constexpr bool FLOAT = true;
    static constexpr u32 LAST = 0xFFFFu;
    static __device__ __forceinline__ u32 key(bf16 x) { return half_key(x.bits, 0x7F80u); }
};
template <>
struct SortKey<f16> {
    typedef u32 Key;
    static constexpr bool FLOAT = true;
    static constexpr u32 LAST = 0xFFFFu;
    static __device__ __forceinline__ u32 key(f16 x) { return half_key(x.bits, 0x7C00u); }
};
template <>
struct SortKey<i64> {
    typedef u64 Key;
    static constexpr bool FLOAT = false;
    static constexpr u64 LAST = ~0ull;
    static __device__ __forceinline__ u64 key(i64 x) { return (u64)x ^ (1ull << 63); }
};
template <>
struct SortKey<i32> {
    typedef u32 Key;
    static constexpr bool FLOAT = false;
    static constexpr u32 LAST = 0xFFFFFFFFu;
    static __device__ __forceinline__ u32 key(i32 x) { return (u32)x ^ 0x80000000u; }
};
template <>
struct SortKey<u8> {
    typedef u32 Key;
    static constexpr bool FLOAT = false;
    static constexpr u32 LAST = 0xFFu;
    static __device__ __forceinline__ u32 key(u8 x) { return x; }
};

}  // namespace library
