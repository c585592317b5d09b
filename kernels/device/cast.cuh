// Converts dtypes as runtime/cpu/src/loops/cast.rs does. Registers of bf16 and f16 are f32 that hold a 16-bit value exactly. Floats
// become integers by truncation, saturating at the limits of the result's type, NaN to 0; integers become narrower ones by their
// low bits; bool is "not zero"; types wider than f32 are rounded to 16 bits once (through round-to-odd).
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

// cvt.rzi saturates at the limits of the result's type, but what it makes of NaN differs from type to type.
#define FLOAT_TO_INTEGER(T, t, in)                                              \
    FN i64 cast_i64(T x) {                                                      \
        i64 y;                                                                  \
        asm("cvt.rzi.s64." t " %0, %1;" : "=l"(y) : in(x));                     \
        return x != x ? 0 : y;                                                  \
    }                                                                           \
    FN i32 cast_i32(T x) {                                                      \
        i32 y;                                                                  \
        asm("cvt.rzi.s32." t " %0, %1;" : "=r"(y) : in(x));                     \
        return x != x ? 0 : y;                                                  \
    }                                                                           \
    FN u8 cast_u8(T x) {                                                        \
        i32 y = cast_i32(x);                                                    \
        return (u8)(y < 0 ? 0 : y > 255 ? 255 : y);                             \
    }
FLOAT_TO_INTEGER(f32, "f32", "f")
FLOAT_TO_INTEGER(f64, "f64", "d")
#undef FLOAT_TO_INTEGER

#define INTEGER_TO_INTEGER(T)                             \
    FN i64 cast_i64(T x) { return (i64)x; }               \
    FN i32 cast_i32(T x) { return (i32)(u32)(u64)x; }     \
    FN u8 cast_u8(T x) { return (u8)(u64)x; }
INTEGER_TO_INTEGER(i64)
INTEGER_TO_INTEGER(i32)
INTEGER_TO_INTEGER(u8)
#undef INTEGER_TO_INTEGER

#define CASTS(T)                                          \
    FN f32 cast_f32(T x) { return (f32)x; }               \
    FN f64 cast_f64(T x) { return (f64)x; }               \
    FN u8 cast_bool(T x) { return x != (T)0; }
CASTS(f32)
CASTS(f64)
CASTS(i64)
CASTS(i32)
CASTS(u8)
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
