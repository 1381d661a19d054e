// Kernels that break a rule of CUDA. Each must be reported, under every schedule.
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr unsigned kAll = 0xffffffff;

__global__ void exit_before_barrier_kernel(int* out) {
    if (threadIdx.x == 7) return;
    __syncthreads();
    out[threadIdx.x] = 0;
}

__global__ void two_barriers_kernel(int* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 0;
}

__global__ void barrier_and_warp_kernel(int* out) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    out[threadIdx.x] = 0;
}

__global__ void absent_lanes_kernel(int* out) { out[threadIdx.x] = __shfl_sync(kAll, 1, 0); }    // launched with 40 threads

__global__ void exited_lane_kernel(int* out) {
    if (threadIdx.x == 3) return;
    out[threadIdx.x] = __shfl_xor_sync(kAll, 1, 1);
}

__global__ void masks_disagree_kernel(int* out) {
    const unsigned lanes = threadIdx.x == 9 ? kAll >> 1 : kAll;
    out[threadIdx.x] = static_cast<int>(__ballot_sync(lanes, 1));
}

__global__ void mask_without_me_kernel(int* out) { out[threadIdx.x] = static_cast<int>(__ballot_sync(0xffff, 1)); }

__global__ void collectives_disagree_kernel(int* out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __any_sync(kAll, 1);
    else
        out[threadIdx.x] = __all_sync(kAll, 1);
}

__global__ void lines_disagree_kernel(int* out) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(kAll, 1, 0);
    else
        out[threadIdx.x] = __shfl_sync(kAll, 2, 0);
}

__global__ void reads_lane_outside_kernel(int* out) {
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_down_sync(0xff, 1, 1);
}

__global__ void bad_width_kernel(int* out) { out[threadIdx.x] = __shfl_sync(kAll, 1, 0, 12); }

__global__ void unwritten_shared_kernel(int* out) {
    SL_SHARED(int, values, 64);
    values.store(static_cast<int>(threadIdx.x), 1);
    __syncthreads();
    out[threadIdx.x] = values.load(static_cast<int>(threadIdx.x) + 32);
}

/// The first block writes, and any later one finds its predecessor's values gone.
__global__ void stale_shared_kernel(int* out) {
    const Shared<int> values = dynamic_shared<int>(0, 32);
    if (blockIdx.x == 1) values.store(static_cast<int>(threadIdx.x), 1);
    out[blockIdx.x * 32 + threadIdx.x] = values.load(static_cast<int>(threadIdx.x));
}

__global__ void past_shared_kernel(int* out) {
    SL_SHARED(int, values, 31);
    values.store(static_cast<int>(threadIdx.x), 1);
    out[threadIdx.x] = 0;
}

__global__ void past_dynamic_kernel(int* out) {
    const Shared<int> values = dynamic_shared<int>(64, 17);      // launched with 128 bytes
    values.store(0, 1);
    out[threadIdx.x] = 0;
}

__global__ void unaligned_shared_kernel(int* out) {
    SL_SHARED(float, values, 64);
    if (threadIdx.x == 0) values.store_as(2, float4{0, 0, 0, 0});
    out[threadIdx.x] = 0;
}

__global__ void too_much_shared_kernel(int* out) {
    SL_SHARED(double, values, 48 * 1024 / 8 + 1);
    values.store(0, 1.0);
    out[threadIdx.x] = 0;
}

/// Lane l hands a value to lane l + 1 through shared memory.
template <bool kSync>
__global__ void neighbour_kernel(int* out) {
    SL_SHARED(int, values, 32);
    const int lane = static_cast<int>(threadIdx.x);
    values.store(lane, lane);
    if (kSync)
        __syncwarp();
    else
        __shfl_sync(kAll, 0, 0);                                   // lanes meet, but nothing orders their memory
    out[lane] = values.load((lane + 31) % 32);
}

/// Groups of lanes order their own accesses, not those of another group.
template <unsigned kLanes>
__global__ void group_kernel(int* out) {
    SL_SHARED(int, values, 32);
    const int lane = static_cast<int>(threadIdx.x);
    values.store(lane, lane);
    __syncwarp(kLanes == 32 ? kAll : ((1u << (kLanes % 32)) - 1) << (lane / static_cast<int>(kLanes) * static_cast<int>(kLanes)));
    out[lane] = values.load(lane ^ 8);
}

__global__ void two_writers_kernel(int* out) {
    SL_SHARED(int, values, 1);
    if (threadIdx.x == 5 || threadIdx.x == 40) values.store(0, 1);
    __syncthreads();
    out[threadIdx.x] = values.load(0);
}

/// Writes again before everybody has read.
template <bool kSecondBarrier>
__global__ void reuse_kernel(int* out) {
    SL_SHARED(int, values, 64);
    const int me = static_cast<int>(threadIdx.x);
    values.store(me, me);
    __syncthreads();
    int sum = values.load(me ^ 63);
    if (kSecondBarrier) __syncthreads();
    values.store(me, sum);
    __syncthreads();
    out[me] = sum + values.load(me ^ 63);
}

/// Neighbouring bytes of one word are no race; the same byte is.
template <int kShift>
__global__ void bytes_kernel(int* out) {
    SL_SHARED(unsigned char, values, 64);
    const int me = static_cast<int>(threadIdx.x);
    values.store(me >> kShift, 1);
    out[me] = 0;
}

template <bool kAtomic>
__global__ void count_kernel(int* out) {
    SL_SHARED(int, count, 1);
    const int me = static_cast<int>(threadIdx.x);
    if (me == 0) count.store(0, 0);
    __syncthreads();
    if (kAtomic)
        count.atomic_add(0, me);
    else
        count.store(0, count.load(0) + me);
    __syncthreads();
    out[me] = count.load(0);
}

__global__ void unaligned_load_kernel(float* out, const float* values) {
    out[threadIdx.x] = load_vector<float4>(values + 1 + 4 * threadIdx.x).x;
}

__global__ void unaligned_store_kernel(float* out) { store_vector(out + 2 + 4 * threadIdx.x, float4{0, 0, 0, 0}); }

Outcome unaligned_load() {
    alignas(16) float values[256] = {};
    return run_and_compare<unaligned_load_kernel, float>(1, 32, 0, 32, [](int) { return 0; }, values);
}

template <auto kKernel>
Outcome run(int threads, std::size_t shared_bytes, int blocks) {
    return run_and_compare<kKernel, int>(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, threads * blocks,
                                         [](int) { return 0; });
}

template <auto kKernel, int kThreads = 32, int kShared = 0, int kBlocks = 1>
Outcome run() {
    return run<kKernel>(kThreads, kShared, kBlocks);
}

template <auto kKernel>
Outcome right(int threads, int (*expected)(int)) {
    return run_and_compare<kKernel, int>(1, static_cast<unsigned>(threads), 0, threads, expected);
}

}  // namespace

const std::vector<Case> fault_cases = {
    {"exit before barrier", run<exit_before_barrier_kernel, 64>},
    {"two barriers", run<two_barriers_kernel, 64>},
    {"barrier and warp", run<barrier_and_warp_kernel>},
    {"absent lanes", run<absent_lanes_kernel, 40>},
    {"exited lane", run<exited_lane_kernel>},
    {"masks disagree", run<masks_disagree_kernel>},
    {"mask without me", run<mask_without_me_kernel>},
    {"collectives disagree", run<collectives_disagree_kernel>},
    {"lines disagree", run<lines_disagree_kernel>},
    {"reads lane outside", run<reads_lane_outside_kernel>},
    {"bad width", run<bad_width_kernel>},
    {"unwritten shared", run<unwritten_shared_kernel>},
    {"stale shared", run<stale_shared_kernel, 32, 128, 3>},
    {"past shared", run<past_shared_kernel>},
    {"past dynamic shared", run<past_dynamic_kernel, 32, 128>},
    {"unaligned shared", run<unaligned_shared_kernel>},
    {"too much shared", run<too_much_shared_kernel>},
    {"neighbour without __syncwarp", run<neighbour_kernel<false>>},
    {"another group's value", run<group_kernel<8>>},
    {"two writers", run<two_writers_kernel, 64>},
    {"reuse without barrier", run<reuse_kernel<false>, 64>},
    {"writers of one byte", run<bytes_kernel<1>, 64>},
    {"count without atomics", run<count_kernel<false>, 64>},
    {"unaligned load", unaligned_load},
    {"unaligned store", [] { return run_and_compare<unaligned_store_kernel, float>(1, 4, 0, 64, [](int) { return 0; }); }},
    {"block too large", run<bytes_kernel<0>, 1025>},
    {"empty grid", run<bytes_kernel<0>, 32, 0, 0>},
    {"shared memory past the device's", run<bytes_kernel<0>, 32, 164 << 10>},

    {"neighbour", [] { return right<neighbour_kernel<true>>(32, [](int lane) { return (lane + 31) % 32; }); }},
    {"group", [] { return right<group_kernel<16>>(32, [](int lane) { return lane ^ 8; }); }},
    {"whole warp", [] { return right<group_kernel<32>>(32, [](int lane) { return lane ^ 8; }); }},
    {"reuse", [] { return right<reuse_kernel<true>>(64, [](int i) { return (i ^ 63) + i; }); }},
    {"writers of neighbouring bytes", [] { return right<bytes_kernel<0>>(64, [](int) { return 0; }); }},
    {"count", [] { return right<count_kernel<true>>(64, [](int) { return 32 * 63; }); }},
};

}  // namespace sparselift::cuda
