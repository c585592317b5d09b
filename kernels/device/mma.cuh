// Wraps the PTX of tensor-core kernels from sm_80: cp.async, ldmatrix and mma.sync m16n8k16. Addresses in shared memory are 32-bit.
//
// Fragments, for lane = 4 g + t:
//   A (16 x 16): a[0] row g, columns 2t and 2t+1; a[1] row g+8; a[2] and a[3] the same 8 columns on.
//   B (16 x 8):  b[0] rows 2t and 2t+1, column g; b[1] 8 rows on.
//   C (16 x 8):  c[0], c[1] row g, columns 2t and 2t+1; c[2], c[3] row g+8.
// Two adjacent C fragments, rounded to 16 bits, are one A fragment: the result of a product is the left operand of the next one
// without leaving the registers. PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
#pragma once
#include "device/base.cuh"

namespace tensor {

// Volatile reads of threadIdx.x and blockIdx.x: values that are recomputed from them after a loop need no registers
// during it.
__device__ __forceinline__ u32 read_tid() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ u32 read_ctaid() {
    u32 x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// The index of this thread's warp, computed so that the compiler knows that it is uniform over the lanes.
__device__ __forceinline__ u32 warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes, or 16 zero bytes if `on` is false (`src` must be a valid address even then).
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, bool on) {
    i32 n = on ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src, bool on) {
    i32 n = on ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread's copies are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_t(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void store_shared(u32 at, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 load_shared4(u32 at) {
    uint4 y;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "r"(at)
                 : "memory");
    return y;
}
__device__ __forceinline__ float2 load_shared2(u32 at) {
    float2 y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(at) : "memory");
    return y;
}

// The differences between the 16-bit float types.
template <typename T>
struct Half;

template <>
struct Half<bf16> {
    static __device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u32 pack(f32 lo, f32 hi) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
        return y;
    }
    static __device__ __forceinline__ f32 lo(u32 x) { return __uint_as_float(x << 16); }
    static __device__ __forceinline__ f32 hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
};

template <>
struct Half<f16> {
    static __device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ __forceinline__ u32 pack(f32 lo, f32 hi) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
        return y;
    }
    static __device__ __forceinline__ f32 lo(u32 x) { return to_f32(f16{(u16)x}); }
    static __device__ __forceinline__ f32 hi(u32 x) { return to_f32(f16{(u16)(x >> 16)}); }
};

// 2^x, to 2 ulp; 0 at -inf.
__device__ __forceinline__ f32 exp2_approx(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace tensor
