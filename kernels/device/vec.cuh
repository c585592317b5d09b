// Moves vectors of adjacent elements between memory and registers of the compute type: up to 16 bytes per access, with
// cp.async copies to shared memory.
#pragma once
#include "device/base.cuh"
#include "device/philox.cuh"

#define FN __device__ __forceinline__

namespace region {

// Converts one element from storage type to compute type and back. A 16-bit float is rounded here if it has not been;
// rounding twice changes nothing.
FN f32 widen(f32 x) { return x; }
FN f64 widen(f64 x) { return x; }
FN i64 widen(i64 x) { return x; }
FN i32 widen(i32 x) { return x; }
FN u8 widen(u8 x) { return x; }
FN f32 widen(bf16 x) { return to_f32(x); }
FN f32 widen(f16 x) { return to_f32(x); }

FN void narrow(f32& o, f32 x) { o = x; }
FN void narrow(f64& o, f64 x) { o = x; }
FN void narrow(i64& o, i64 x) { o = x; }
FN void narrow(i32& o, i32 x) { o = x; }
FN void narrow(u8& o, u8 x) { o = x; }
FN void narrow(bf16& o, f32 x) { o = to_bf16(x); }
FN void narrow(f16& o, f32 x) { o = to_f16(x); }

// Loads `B` bytes (a multiple of 4) as words. `NC`: nothing in this kernel writes them.
template <int B, bool NC>
FN void load_words(u32* w, const void* p) {
    if constexpr (B >= 16) {
#pragma unroll
        for (int i = 0; i < B / 16; i++) {
            uint4 q = NC ? __ldg((const uint4*)p + i) : ((const uint4*)p)[i];
            w[4 * i] = q.x, w[4 * i + 1] = q.y, w[4 * i + 2] = q.z, w[4 * i + 3] = q.w;
        }
    } else if constexpr (B == 8) {
        uint2 q = NC ? __ldg((const uint2*)p) : *(const uint2*)p;
        w[0] = q.x, w[1] = q.y;
    } else {
        w[0] = NC ? __ldg((const u32*)p) : *(const u32*)p;
    }
}

template <int B>
FN void store_words(void* p, const u32* w) {
    if constexpr (B >= 16) {
#pragma unroll
        for (int i = 0; i < B / 16; i++) {
            ((uint4*)p)[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
        }
    } else if constexpr (B == 8) {
        *(uint2*)p = make_uint2(w[0], w[1]);
    } else {
        *(u32*)p = w[0];
    }
}

FN void unpack(f32& o, const u32* w, int i, const f32*) { o = __uint_as_float(w[i]); }
FN void unpack(i32& o, const u32* w, int i, const i32*) { o = (i32)w[i]; }
FN void unpack(f64& o, const u32* w, int i, const f64*) { o = __hiloint2double((int)w[2 * i + 1], (int)w[2 * i]); }
FN void unpack(i64& o, const u32* w, int i, const i64*) { o = (i64)((u64)w[2 * i + 1] << 32 | w[2 * i]); }
FN void unpack(u8& o, const u32* w, int i, const u8*) { o = (u8)(w[i / 4] >> (8 * (i % 4))); }
FN void unpack(f32& o, const u32* w, int i, const bf16*) {
    o = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
}
FN void unpack(f32& o, const u32* w, int i, const f16*) { o = to_f32(f16{(u16)(w[i / 2] >> (16 * (i % 2)))}); }

FN void pack(u32* w, int i, f32 x, const f32*) { w[i] = __float_as_uint(x); }
FN void pack(u32* w, int i, i32 x, const i32*) { w[i] = (u32)x; }
FN void pack(u32* w, int i, f64 x, const f64*) {
    w[2 * i] = (u32)__double2loint(x), w[2 * i + 1] = (u32)__double2hiint(x);
}
FN void pack(u32* w, int i, i64 x, const i64*) { w[2 * i] = (u32)x, w[2 * i + 1] = (u32)((u64)x >> 32); }
FN void pack(u32* w, int i, u8 x, const u8*) { w[i / 4] = i % 4 ? w[i / 4] | (u32)x << (8 * (i % 4)) : x; }
// Elements arrive in order: the first of a pair is kept until the second arrives.
FN void pack(u32* w, int i, f32 x, const bf16*) {
    if (i % 2) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i / 2]) : "f"(x), "f"(__uint_as_float(w[i / 2])));
    } else {
        w[i / 2] = __float_as_uint(x);
    }
}
FN void pack(u32* w, int i, f32 x, const f16*) {
    u32 h = to_f16(x).bits;
    w[i / 2] = i % 2 ? w[i / 2] | h << 16 : h;
}

// Loads `V` elements from `p`, aligned to all of them or to 16 bytes.
template <int V, bool NC, class C, class S>
FN void load_vec(C* o, const S* p) {
    constexpr int B = V * (int)sizeof(S);
    if constexpr (B % 4 == 0) {
        u32 w[B / 4];
        load_words<B, NC>(w, p);
#pragma unroll
        for (int i = 0; i < V; i++) unpack(o[i], w, i, p);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) o[i] = widen(p[i]);
    }
}

// The same from words that were loaded before.
template <int V, class C, class S>
FN void unpack_words(C* o, const u32* w, const S* p) {
#pragma unroll
    for (int i = 0; i < V; i++) unpack(o[i], w, i, p);
}

// Forces the unpacking to happen here instead of at the use, so that the words' registers can be reused for the next
// load.
FN void pin_register(f32& x) { asm volatile("" : "+f"(x)); }
template <class C> FN void pin_register(C&) {}
template <int V, class C, class S>
FN void unpack_words_now(C* o, const u32* w, const S* p) {
    unpack_words<V>(o, w, p);
#pragma unroll
    for (int i = 0; i < V; i++) pin_register(o[i]);
}

template <int V, class C, class S>
FN void store_vec(S* p, const C* x) {
    constexpr int B = V * (int)sizeof(S);
    if constexpr (B % 4 == 0) {
        u32 w[B / 4];
#pragma unroll
        for (int i = 0; i < V; i++) pack(w, i, x[i], p);
        store_words<B>(p, w);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) narrow(p[i], x[i]);
    }
}

// The same if only `left` elements remain; `left` may exceed `V`.
template <int V, bool NC, class I, class C, class S>
FN void load_vec_tail(C* o, const S* p, I left) {
    if (left >= V) {
        load_vec<V, NC>(o, p);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) {
            if (i < left) o[i] = widen(p[i]);
        }
    }
}

template <int V, class I, class C, class S>
FN void store_vec_tail(S* p, const C* x, I left) {
    if (left >= V) {
        store_vec<V>(p, x);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) {
            if (i < left) narrow(p[i], x[i]);
        }
    }
}

// The same, followed by `pads` zeros after the last element, which end at this pack or a few packs later.
template <int V, class I, class C, class S>
FN void store_vec_padded(S* p, const C* x, I left, I pads) {
    if (left > V) {
        store_vec<V>(p, x);
    } else {
        C y[V], none[V] = {};
#pragma unroll
        for (int i = 0; i < V; i++) y[i] = i < left ? x[i] : (C)0;
        store_vec<V>(p, y);
        for (I i = V; i < left + pads; i += V) store_vec<V>(p + i, none);
    }
}

// Generates the uniform numbers of elements `at .. at + V`, a whole number of groups of four, starting at a multiple of
// four.
template <int V>
FN void uniform_vec(f32* o, u64 seed, u64 counter, u64 at) {
    static_assert(V % 4 == 0, "groups of four");
#pragma unroll
    for (int g = 0; g < V / 4; g++) {
        u64 group = (at >> 2) + g;
        Words words = philox4x32((u32)group, (u32)(group >> 32), (u32)counter, (u32)(counter >> 32), (u32)seed, (u32)(seed >> 32));
#pragma unroll
        for (int i = 0; i < 4; i++) o[4 * g + i] = (f32)(words.w[i] >> 8) * (1.0f / 16777216.0f);
    }
}

// Copies `B` bytes (4, 8 or a multiple of 16) to shared memory asynchronously. The copying thread may read them after `cp_async_wait`.
template <int B>
FN void cp_async(void* to, const void* from) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    if constexpr (B >= 16) {
#pragma unroll
        for (int i = 0; i < B; i += 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i), "l"((const u8*)from + i) : "memory");
        }
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(B) : "memory");
    }
}
// Ends a group of copies; waits for all groups but the last N.
FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
FN void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Prefetches `bytes` (a multiple of 16, like the address) to L2 with one instruction, from sm_90 on.
FN void prefetch_l2(const void* p, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// Stores V results of a thread as f32 in place of V elements of type S that only this thread reads. The part that does
// not fit in 16 bits is stored `plane` elements of S further on: each access covers as many adjacent bytes as the load
// of S did.
template <int V, class S>
FN void smem_store_f32(S* p, u32 plane, const f32* x) {
    constexpr int B = V * (int)sizeof(S), N = B / 4;
#pragma unroll
    for (int j = 0; j < V / N; j++) {
        u32 w[N];
#pragma unroll
        for (int i = 0; i < N; i++) w[i] = __float_as_uint(x[N * j + i]);
        store_words<B>(p + j * plane, w);
    }
}
template <int V, class S>
FN void smem_load_f32(f32* x, const S* p, u32 plane) {
    constexpr int B = V * (int)sizeof(S), N = B / 4;
#pragma unroll
    for (int j = 0; j < V / N; j++) {
        u32 w[N];
        load_words<B, false>(w, p + j * plane);
#pragma unroll
        for (int i = 0; i < N; i++) x[N * j + i] = __uint_as_float(w[i]);
    }
}
// Reads element `at` of a row stored by `smem_store_f32`.
template <int V, class S>
FN f32 smem_load_f32_at(const S* row, u32 plane, u32 at) {
    constexpr int N = V * (int)sizeof(S) / 4;
    return ((const f32*)(row + at / V * V + at % V / N * plane))[at % N];
}

// x / d for x < 2^31, with the multiplier ceil(2^(31 + s) / d) where 2^(s - 1) < d <= 2^s.
FN u32 fast_divide(u32 x, u32 multiplier, u32 shift) { return (u32)(((u64)x * multiplier) >> shift); }

}  // namespace region

#undef FN
