// Converts dtypes as runtime/cpu/src/loops/cast.rs does. Registers of bf16 and f16 are f32 that hold a 16-bit value exactly. Floats
// become integers by truncation through i64, saturating, NaN to 0; bool is "not zero"; types wider than f32 are rounded to 16
// bits once (through round-to-odd).
#pragma once
#include "device/base.cuh"

#define FN __device__ __forceinline__

namespace region {

// Uses the conversions of pairs, which are several times faster than those of single values. The bf16 is in the upper
// half of the word, where it is a valid f32.
FN f32 round_bf16(f32 x) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(0.0f));
    return __uint_as_float(y);
}
FN f32 round_f16(f32 x) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(0.0f), "f"(x));
    return to_f32(f16{(u16)y});
}

// `x` as f32 with an odd last bit if inexact (round-to-odd), so that rounding it again equals rounding `x` once.
FN f32 to_odd(f64 x) {
    f32 y = __double2float_rz(x);
    return x == x && (f64)y != x ? __uint_as_float(__float_as_uint(y) | 1u) : y;
}

FN i64 float_to_i64(f32 x) {
    i64 y;
    asm("cvt.rzi.s64.f32 %0, %1;" : "=l"(y) : "f"(x));
    return x != x ? 0 : y;
}
FN i64 float_to_i64(f64 x) {
    i64 y;
    asm("cvt.rzi.s64.f64 %0, %1;" : "=l"(y) : "d"(x));
    return x != x ? 0 : y;
}

#define CASTS(T, to_int)                                  \
    FN f32 cast_f32(T x) { return (f32)x; }               \
    FN f64 cast_f64(T x) { return (f64)x; }               \
    FN i64 cast_i64(T x) { return to_int(x); }            \
    FN i32 cast_i32(T x) { return (i32)(u64)to_int(x); }  \
    FN u8 cast_u8(T x) { return (u8)(u64)to_int(x); }     \
    FN u8 cast_bool(T x) { return x != (T)0; }
CASTS(f32, float_to_i64)
CASTS(f64, float_to_i64)
CASTS(i64, (i64))
CASTS(i32, (i64))
CASTS(u8, (i64))
#undef CASTS

FN f32 cast_bf16(f32 x) { return round_bf16(x); }
FN f32 cast_bf16(f64 x) { return round_bf16(to_odd(x)); }
FN f32 cast_bf16(i64 x) { return round_bf16(to_odd((f64)x)); }
FN f32 cast_bf16(i32 x) { return round_bf16(to_odd((f64)x)); }
FN f32 cast_bf16(u8 x) { return (f32)x; }
FN f32 cast_f16(f32 x) { return round_f16(x); }
FN f32 cast_f16(f64 x) { return round_f16(to_odd(x)); }
FN f32 cast_f16(i64 x) { return round_f16(to_odd((f64)x)); }
FN f32 cast_f16(i32 x) { return round_f16(to_odd((f64)x)); }
FN f32 cast_f16(u8 x) { return (f32)x; }

}  // namespace region

#undef FN
