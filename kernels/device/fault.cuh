// Reports an index out of range from a kernel. The cell is in mapped host memory, which the host may read while kernels
// run, so `set` is written last. The first report is kept. After a report, the kernel continues with a valid index,
// since it must not access memory out of bounds. Kernels that write States return at once while `halt` is not 0.
#pragma once
#include "device/base.cuh"

struct Fault {
    u32 set;     // 0 if nothing was reported
    u32 taken;   // 1 if a thread is writing its report
    i64 value;   // the index found
    i64 size;    // valid indices are -size .. size, or 0 .. size
    u32* halt;   // a word of device memory
};

__device__ __noinline__ inline void report(Fault* fault, i64 value, i64 size) {
    if (atomicCAS(&fault->taken, 0u, 1u) == 0u) {
        fault->value = value;
        fault->size = size;
        __threadfence_system();
        *(volatile u32*)&fault->set = 1u;
        *(volatile u32*)fault->halt = 1u;
    }
}
