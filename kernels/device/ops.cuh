// Computes the elementwise functions, one per `MapFn` of runtime/core/src/ops/elementwise.rs: `op_` and its name in snake case,
// overloaded by compute type (f32, f64, i64, i32, u8; bools are u8). Results are those of runtime/cpu/src/math: integers
// wrap, division rounds down and is total, NaN propagates. 16-bit floats arrive as f32; the caller rounds the result. Compiled
// with --fmad=false, so that nothing is contracted.
#pragma once
#include "device/base.cuh"

#define EACH_FLOAT(m) m(f32) m(f64)
#define EACH_INT(m) m(i64, u64) m(i32, u32) m(u8, u32)
#define EACH_TYPE(m) m(f32) m(f64) m(i64) m(i32) m(u8)
#define FN __device__ __forceinline__

// ---- all types
#define OP_ALL(T)                                                   \
    FN T op_copy(T x) { return x; }                                 \
    FN T op_where(u8 c, T x, T y) { return c != 0 ? x : y; }        \
    FN u8 op_eq(T x, T y) { return x == y; }                        \
    FN u8 op_ne(T x, T y) { return x != y; }                        \
    FN u8 op_lt(T x, T y) { return x < y; }                         \
    FN u8 op_le(T x, T y) { return x <= y; }                        \
    FN u8 op_gt(T x, T y) { return x > y; }                         \
    FN u8 op_ge(T x, T y) { return x >= y; }
EACH_TYPE(OP_ALL)
#undef OP_ALL

// ---- bools
FN u8 op_logical_and(u8 x, u8 y) { return (x != 0) & (y != 0); }
FN u8 op_logical_or(u8 x, u8 y) { return (x != 0) | (y != 0); }
FN u8 op_logical_xor(u8 x, u8 y) { return (x != 0) ^ (y != 0); }
FN u8 op_logical_not(u8 x) { return x == 0; }

// ---- integers; signed overflow is undefined in C++, so arithmetic goes through unsigned types
#define OP_INT(T, U)                                                                        \
    FN T op_neg(T x) { return (T)(0 - (U)x); }                                              \
    FN T op_abs(T x) { return x < 0 ? (T)(0 - (U)x) : x; }                                  \
    FN T op_sign(T x) { return (T)((x > 0) - (x < 0)); }                                    \
    FN T op_relu(T x) { return x > 0 ? x : (T)0; }                                          \
    FN T op_add(T x, T y) { return (T)((U)x + (U)y); }                                      \
    FN T op_sub(T x, T y) { return (T)((U)x - (U)y); }                                      \
    FN T op_mul(T x, T y) { return (T)((U)x * (U)y); }                                      \
    FN T op_maximum(T x, T y) { return x > y ? x : y; }                                     \
    FN T op_minimum(T x, T y) { return x < y ? x : y; }                                     \
    FN u8 op_is_nan(T) { return 0; }                                                        \
    FN u8 op_is_inf(T) { return 0; }                                                        \
    FN T op_pow(T x, T y) {                                                                 \
        if (y < 0 && x != 1 && x != (T)-1) return 0;                                        \
        U base = (U)x, n = (U)y, product = 1;                                               \
        while (n != 0) {                                                                    \
            if (n & 1) product *= base;                                                     \
            base *= base;                                                                   \
            n >>= 1;                                                                        \
        }                                                                                   \
        return (T)product;                                                                  \
    }                                                                                       \
    /* The same number, and no compiler can know it: every grid is one block deep. */       \
    FN T opaque(T x) { return x ^ (T)(gridDim.z - 1); }
EACH_INT(OP_INT)
#undef OP_INT

// Division of 64 bits is a call: the assembler needs a minute for a kernel that inlines 28 of them.
#define OP_DIVISION(T, U, CALL)                                                             \
    CALL T op_floor_div(T x, T y) {                                                         \
        if (y == 0) return 0;                                                               \
        if (y == (T)-1 && (T)-1 < 0) return (T)(0 - (U)x);                                  \
        T q = x / y, r = x % y;                                                             \
        return r != 0 && (r < 0) != (y < 0) ? (T)(q - 1) : q;                               \
    }                                                                                       \
    CALL T op_remainder(T x, T y) {                                                         \
        if (y == 0 || (y == (T)-1 && (T)-1 < 0)) return 0;                                  \
        T r = x % y;                                                                        \
        return r != 0 && (r < 0) != (y < 0) ? (T)(r + y) : r;                               \
    }
OP_DIVISION(i64, u64, static __device__ __noinline__)
OP_DIVISION(i32, u32, FN)
OP_DIVISION(u8, u32, FN)
#undef OP_DIVISION

// ---- floats
// A value opaque to NVVM, which must not constant-fold a function with the host's arithmetic. The assembler would still
// fold it, so comparisons of integers with themselves, which lead to known values, are opaque to both.
FN f32 opaque(f32 x) {
    asm("" : "+f"(x));
    return x;
}
FN f64 opaque(f64 x) {
    asm("" : "+d"(x));
    return x;
}

#define OP_FLOAT(T)                                                                         \
    FN T op_neg(T x) { return -x; }                                                         \
    FN T op_abs(T x) { return fabs(x); }                                                    \
    FN T op_sign(T x) { return x > (T)0 ? (T)1 : x < (T)0 ? (T)-1 : x + (T)0; }             \
    FN T op_relu(T x) { return x < (T)0 ? (T)0 : x; }                                       \
    FN T op_add(T x, T y) { return x + y; }                                                 \
    FN T op_sub(T x, T y) { return x - y; }                                                 \
    FN T op_mul(T x, T y) { return x * y; }                                                 \
    FN T op_div(T x, T y) { return x / y; }                                                 \
    FN T op_reciprocal(T x) { return (T)1 / x; }                                            \
    FN T op_maximum(T x, T y) { return x > y || x != x ? x : y; }                           \
    FN T op_minimum(T x, T y) { return x < y || x != x ? x : y; }                           \
    FN u8 op_is_nan(T x) { return x != x; }                                                 \
    FN u8 op_is_inf(T x) { return fabs(x) == (T)__longlong_as_double(0x7ff0000000000000); } \
    FN T op_floor(T x) { return floor(x); }                                                 \
    FN T op_ceil(T x) { return ceil(x); }                                                   \
    FN T op_round(T x) { return rint(x); }                                                  \
    FN T op_sqrt(T x) { return sqrt(x); }                                                   \
    FN T op_rsqrt(T x) { return (T)1 / sqrt(x); }                                           \
    FN T op_exp(T x) { return exp(opaque(x)); }                                             \
    FN T op_expm1(T x) { return expm1(opaque(x)); }                                         \
    FN T op_log(T x) { return log(opaque(x)); }                                             \
    FN T op_log1p(T x) { return log1p(opaque(x)); }                                         \
    FN T op_sin(T x) { return sin(opaque(x)); }                                             \
    FN T op_cos(T x) { return cos(opaque(x)); }                                             \
    FN T op_tan(T x) { return tan(opaque(x)); }                                             \
    FN T op_tanh(T x) { return tanh(opaque(x)); }                                           \
    FN T op_erf(T x) { return erf(opaque(x)); }                                             \
    FN T op_pow(T x, T y) { return pow(opaque(x), opaque(y)); }                             \
    FN T op_remainder(T x, T y) {                                                           \
        T r = fmod(x, y);                                                                   \
        T lifted = (r < (T)0) != (y < (T)0) ? r + y : r;                                    \
        return r == (T)0 ? copysign((T)0, y) : lifted;                                      \
    }
EACH_FLOAT(OP_FLOAT)
#undef OP_FLOAT

// 1 / (1 + exp(-x)), where exp(-x) = 2^t (1 + d): t is the rounded product, and d what rounding and the constant lose.
// Between the bounds, 2^t is finite and d a number; beyond them the result is 1, or 0 as it would be below 2^-126. One
// Newton step for the quotient also recovers what the sum lost.
FN f32 op_sigmoid(f32 x) {
    const f32 MINUS_LOG2E = -1.44269502f, REST = -1.92596303e-8f, LN2 = 0.693147182f, BOUND = 88.7f;
    asm("max.NaN.f32 %0, %0, %1;\n\tmin.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(-BOUND), "f"(BOUND));
    const f32 t = __fmul_rn(x, MINUS_LOG2E);
    const f32 d = __fmul_rn(LN2, __fmaf_rn(x, REST, __fmaf_rn(x, MINUS_LOG2E, -t)));
    f32 e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    e = __fmaf_rn(e, d, e);
    const f32 sum = __fadd_rn(1.0f, e), lost = __fadd_rn(e, -__fadd_rn(sum, -1.0f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(sum));
    return __fmaf_rn(y, __fmaf_rn(-lost, y, __fmaf_rn(-sum, y, 1.0f)), y);
}
// Computed from exp(-|x|): it cannot overflow and keeps its relative accuracy as it approaches 0.
FN f64 share(f64 x, f64 e) {
    const f64 sum = 1.0 + e, q = (x < 0.0 ? e : 1.0) / sum;
    return q - q * (e - (sum - 1.0));
}
FN f64 op_sigmoid(f64 x) { return share(x, exp(-fabs(opaque(x)))); }
FN f64 op_sigmoid2(f64 x) { return share(x, exp2(-fabs(opaque(x)))); }

// 1 / (1 + 2^-x) and its complement to 1, without loss before the exponential. They are y = 1 / (1 + e) and e y, where
// e = 2^-|x|, so a kernel that needs both computes them once; the code has no branches, across which ptxas would not
// find the common part. The Newton step uses 1 - y - e y as the remainder, which the rounded sum does not contain.
FN f32 sigmoid2(f32 x, bool below) {
    f32 e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-fabsf(x)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fadd_rn(1.0f, e)));
    y = __fmaf_rn(y, __fmaf_rn(-e, y, __fadd_rn(1.0f, -y)), y);
    const f32 other = __fmul_rn(e, y);
    return below ? other : y;
}
FN f32 op_sigmoid2(f32 x) { return sigmoid2(x, x < 0.0f); }
FN f32 op_sigmoid2_rest(f32 x) { return sigmoid2(x, !(x < 0.0f)); }
FN f64 op_sigmoid2_rest(f64 x) { return op_sigmoid2(-x); }

// ---- 8-bit floats (runtime/cpu/src/math/fp8.rs)
// From sm_89 on by an instruction, which converts infinity to the largest number; on older GPUs by the steps of the
// CPU.
#define FP8(name, mantissa, top, least, infinite)                                                  \
    FN u8 op_fp8_##name(f32 x) {                                                                    \
        const u32 bits = __float_as_uint(x) & 0x7fffffff, sign = __float_as_uint(x) >> 24 & 0x80;   \
        u32 code;                                                                                   \
        FP8_BYTE(name, mantissa, top, least)                                                        \
        return (u8)(bits == 0x7f800000 ? infinite : code);                                          \
    }                                                                                               \
    FN f32 op_fp8_##name##_value(f32 x) {                                                           \
        const u32 code = (u32)x & 0xff, half = code & 0x7f;                                         \
        f32 a = __uint_as_float(half << (23 - mantissa)) * __uint_as_float((126 + least) << 23);    \
        if (mantissa == 2 && half == 0x7c) a = __uint_as_float(0x7f800000);                         \
        if (half > (mantissa == 2 ? 0x7c : 0x7e)) a = __uint_as_float(0x7fc00000);                  \
        return __uint_as_float(__float_as_uint(a) | (code & 0x80) << 24);                           \
    }
#if __CUDA_ARCH__ >= 890
#define FP8_BYTE(name, mantissa, top, least)                                                        \
    u16 pair;                                                                                       \
    asm("cvt.rn.satfinite." #name "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));           \
    code = bits > 0x7f800000 ? 0x7f : pair & 0xff;
#else
#define FP8_BYTE(name, mantissa, top, least)                                                        \
    const u32 b = bits > top ? top : bits, shift = 23 - mantissa;                                   \
    const f32 step = __uint_as_float((least + shift) << 23);                                        \
    if (b >> 23 < least)                                                                            \
        code = __float_as_uint(__uint_as_float(b) + step) - __float_as_uint(step);                  \
    else                                                                                            \
        code = ((b + (1u << (shift - 1)) - 1 + (b >> shift & 1)) >> shift) - ((least - 1) << mantissa); \
    code = bits > 0x7f800000 ? 0x7f : code | sign;
#endif
FP8(e4m3, 3, 0x43e00000, 121, 0x7f)
FP8(e5m2, 2, 0x47600000, 113, (sign | 0x7c))
#undef FP8_BYTE
#undef FP8
// As f32 with an odd last bit if inexact, so that rounding it again equals rounding once.
FN f32 fp8_odd(f64 x) {
    f32 y = __double2float_rz(x);
    return x == x && (f64)y != x ? __uint_as_float(__float_as_uint(y) | 1u) : y;
}
FN u8 op_fp8_e4m3(f64 x) { return op_fp8_e4m3(fp8_odd(x)); }
FN u8 op_fp8_e5m2(f64 x) { return op_fp8_e5m2(fp8_odd(x)); }
FN f64 op_fp8_e4m3_value(f64 x) { return op_fp8_e4m3_value((f32)x); }
FN f64 op_fp8_e5m2_value(f64 x) { return op_fp8_e5m2_value((f32)x); }

// f64 represents a quotient of two f32 precisely enough never to round it up to an integer that f32 could distinguish.
FN f32 op_floor_div(f32 x, f32 y) {
    const f32 inf = __int_as_float(0x7f800000);
    f32 q = (f32)floor((f64)x / (f64)y);
    bool opposite = (x < 0.0f && y > 0.0f) || (x > 0.0f && y < 0.0f);
    if (fabsf(y) == inf && opposite) q = -1.0f;
    return fabsf(x) == inf && y != 0.0f ? __int_as_float(0x7fffffff) : q;
}

FN f64 op_floor_div(f64 x, f64 y) {
    f64 r = fmod(x, y);
    f64 q = (x - r) / y;
    if (r != 0.0 && (r < 0.0) != (y < 0.0)) q -= 1.0;
    f64 near = rint(q);
    f64 whole = near == 0.0 ? copysign(0.0, x / y) : near;
    return y == 0.0 ? x / y : whole;
}

#undef EACH_FLOAT
#undef EACH_INT
#undef EACH_TYPE
#undef FN
