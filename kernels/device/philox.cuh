// Generates random words with Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), with the bits of
// runtime/core/src/philox.rs.
#pragma once
#include "device/base.cuh"

struct Words {
    u32 w[4];
};

__device__ __forceinline__ Words philox4x32(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
    }
    return Words{{c0, c1, c2, c3}};
}

// The uniform f32 in [0, 1) that `element` of a random tensor draws: 24 bits of a group of four shared words.
__device__ __forceinline__ f32 uniform(u64 seed, u64 counter, u64 element) {
    u64 group = element >> 2;
    Words words = philox4x32((u32)group, (u32)(group >> 32), (u32)counter, (u32)(counter >> 32), (u32)seed, (u32)(seed >> 32));
    u32 at = (u32)element & 3u;
    u32 bits = at == 0 ? words.w[0] : at == 1 ? words.w[1] : at == 2 ? words.w[2] : words.w[3];
    return (f32)(bits >> 8) * (1.0f / 16777216.0f);
}
