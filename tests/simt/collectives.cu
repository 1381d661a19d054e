// What barriers, shuffles and votes give.
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr unsigned kAll = 0xffffffff;

__device__ int thread_number() { return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }

__global__ void indices_kernel(int* out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + static_cast<unsigned>(thread_number())] = static_cast<int>(block * 1000) + thread_number();
}

/// One output a lane and collective.
__global__ void shuffles_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[lane] = __shfl_sync(kAll, lane * 10, 5);
    out[32 + lane] = __shfl_sync(kAll, lane, 3, 8);
    out[64 + lane] = __shfl_up_sync(kAll, lane, 3);
    out[96 + lane] = __shfl_down_sync(kAll, lane, 3, 16);
    out[128 + lane] = __shfl_xor_sync(kAll, lane, 5);
    out[160 + lane] = __shfl_sync(kAll, lane, 35);                       // wraps round
    out[192 + lane] = static_cast<int>(__shfl_sync(kAll, static_cast<double>(lane) + 0.5, 31) * 2);
}

int shuffled(int i) {
    const int lane = i % 32;
    switch (i / 32) {
        case 0: return 50;
        case 1: return lane / 8 * 8 + 3;
        case 2: return lane < 3 ? lane : lane - 3;
        case 3: return lane % 16 + 3 < 16 ? lane + 3 : lane;
        case 4: return lane ^ 5;
        case 5: return 3;
        default: return 63;
    }
}

__global__ void votes_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[lane] = static_cast<int>(__ballot_sync(kAll, lane % 3 == 0));
    out[32 + lane] = __any_sync(kAll, lane == 31) + 2 * __any_sync(kAll, 0);
    out[64 + lane] = __all_sync(kAll, lane < 32) + 2 * __all_sync(kAll, lane < 31);
    out[96 + lane] = static_cast<int>(__match_any_sync(kAll, lane / 5));
    out[128 + lane] = __reduce_add_sync(kAll, lane);
    out[160 + lane] = __reduce_min_sync(kAll, lane - 7) + __reduce_max_sync(kAll, lane - 7);
}

int voted(int i) {
    const int lane = i % 32;
    unsigned votes = 0;
    switch (i / 32) {
        case 0:
            for (int other = 0; other < 32; other += 3) votes |= 1u << other;
            return static_cast<int>(votes);
        case 1: return 1;
        case 2: return 1;
        case 3:
            for (int other = 0; other < 32; ++other) votes |= static_cast<unsigned>(other / 5 == lane / 5) << other;
            return static_cast<int>(votes);
        case 4: return 31 * 16;
        default: return -7 + 24;
    }
}

/// Groups of 8 lanes that loop differently often: each meets under a mask of its own.
__global__ void subwarps_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    const unsigned group = 0xffu << (lane / 8 * 8);
    int total = 0;
    for (int turn = 0; turn <= lane / 8; ++turn) {
        int sum = lane;
        for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(group, sum, step, 8);
        total += sum;
    }
    out[lane] = total;
}

int subwarp_total(int lane) { return (lane / 8 + 1) * (28 + 64 * (lane / 8)); }

/// __syncwarp may stand at different lines, with the same lanes.
__global__ void branches_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < 7) {
        out[lane] = 1;
        __syncwarp();
    } else {
        out[lane] = 2;
        __syncwarp();
    }
}

__global__ void barriers_kernel(int* out) {
    const int me = thread_number();
    const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    out[me] = __syncthreads_count(me % 2) + 1000 * __syncthreads_or(me == threads - 1) + 2000 * __syncthreads_and(me < threads) +
              4000 * __syncthreads_or(0) + 8000 * __syncthreads_and(me);
}

/// A sum over a block: shuffles inside warps, shared memory between them.
__global__ void block_sum_kernel(float* out) {
    SL_SHARED(float, sums, 32);
    const int me = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x / 32);
    float sum = static_cast<float>(me);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, static_cast<unsigned>(step));
    if (me % 32 == 0) sums.store(me / 32, sum);
    __syncthreads();
    if (me == 0) {
        float total = 0;
        for (int warp = 0; warp < warps; ++warp) total += sums.load(warp);
        out[blockIdx.x] = total;
    }
}

template <int kThreads>
Outcome block_sum() {
    return run_and_compare<block_sum_kernel, float>(3, kThreads, 0, 3, [](int) { return kThreads * (kThreads - 1) / 2; });
}

}  // namespace

const std::vector<Case> collective_cases = {
    {"indices",
     [] {
         return run_and_compare<indices_kernel, int>({2, 3, 2}, {5, 2, 3}, 0, 360, [](int i) { return i / 30 * 1000 + i % 30; });
     }},
    {"shuffles", [] { return run_and_compare<shuffles_kernel, int>(1, 32, 0, 224, shuffled); }},
    {"votes", [] { return run_and_compare<votes_kernel, int>(1, 32, 0, 192, voted); }},
    {"subwarps", [] { return run_and_compare<subwarps_kernel, int>(1, 32, 0, 32, subwarp_total); }},
    {"branches", [] { return run_and_compare<branches_kernel, int>(1, 32, 0, 32, [](int lane) { return lane < 7 ? 1 : 2; }); }},
    {"barriers", [] { return run_and_compare<barriers_kernel, int>(1, {8, 5}, 0, 40, [](int) { return 3020; }); }},
    {"block sum 32", block_sum<32>},
    {"block sum 1024", block_sum<1024>},
};

}  // namespace sparselift::cuda
