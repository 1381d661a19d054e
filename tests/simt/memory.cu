// Atomics, 16-bit floats, vectors, the runtime's stand-ins and the sort.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "api/guarded.h"
#include "harness.h"
#include "simt/machine.h"

namespace sparselift::cuda {
namespace {

Outcome outcome_of(bool right) { return {SL_OK, right}; }

__global__ void atomics_kernel(int* out) {
    const int me = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(out, me);
    atomicMax(out + 1, me);
    atomicMin(out + 2, -me);
    atomicOr(out + 3, 1 << (me % 8));
    atomicAnd(out + 4, ~(1 << (me % 3)));
    for (int seen = atomicAdd(out + 5, 0), old = seen - 1; old != seen;) {      // an addition by hand
        old = seen;
        seen = atomicCAS(out + 5, old, old + 2);
    }
    if (atomicExch(out + 6, 1) == 1) atomicAdd(out + 7, 1);       // all but one find 1
}

int atomics_result(int i) {
    constexpr int kStart = -77, kThreads = 128;
    constexpr int kResults[] = {kStart + kThreads * (kThreads - 1) / 2, kThreads - 1, -(kThreads - 1), kStart | 255, kStart & ~7,
                                kStart + 2 * kThreads, 1, kStart + kThreads - 1};
    return kResults[i];
}

/// A queue: each thread takes a place by an atomic, and the places are a permutation, whose order the schedule decides.
__global__ void places_kernel(int* out, int* head) { out[threadIdx.x] = atomicAdd(head, 1); }

std::vector<int> places() {
    std::vector<int> taken(64);
    int head = 0;
    const sl_status status = launch<places_kernel>(1, 64, 0, nullptr, taken.data(), &head);
    return status == SL_OK ? taken : std::vector<int>();
}

Outcome schedules() {
    std::vector<int> forward(64);
    std::iota(forward.begin(), forward.end(), 0);
    const std::vector<int> reverse(forward.rbegin(), forward.rend());
    bool right = simt::set_schedule("forward") && places() == forward;
    right = right && simt::set_schedule("reverse") && places() == reverse;
    right = right && simt::set_schedule("random:1");
    const std::vector<int> one = places(), again = places();
    right = right && simt::set_schedule("random:2");
    const std::vector<int> two = places();
    right = right && one == again && one != two && one != forward;
    right = right && std::is_permutation(one.begin(), one.end(), forward.begin(), forward.end());
    for (const char* text : {"", "backward", "random", "random:", "random:-1", "random:4294967296", "random:1x"})
        right = right && !simt::set_schedule(text);
    return outcome_of(right && places() == two);
}

__global__ void order_of_blocks_kernel(int* out, int* head) { out[atomicAdd(head, 1)] = static_cast<int>(blockIdx.x); }

/// Every block runs once, in the schedule's order.
Outcome blocks() {
    bool right = true;
    for (const char* schedule : {"forward", "reverse", "random:0", "random:7"}) {
        for (int count : {1, 2, 3, 64, 65, 1000}) {
            std::vector<int> order(static_cast<std::size_t>(count)), sorted(order.size());
            std::iota(sorted.begin(), sorted.end(), 0);
            int head = 0;
            right = right && simt::set_schedule(schedule);
            right = right && launch<order_of_blocks_kernel>(static_cast<unsigned>(count), 1, 0, nullptr, order.data(), &head) == SL_OK;
            right = right && std::is_permutation(order.begin(), order.end(), sorted.begin(), sorted.end());
            if (count > 60) right = right && (order == sorted) == (schedule[0] == 'f');
        }
    }
    return outcome_of(right);
}

float rounded(double value, int mantissa_bits, int least_exponent) {
    if (value == 0) return 0;
    const int exponent = std::max(std::ilogb(value), least_exponent);
    return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(value, mantissa_bits - exponent)), exponent - mantissa_bits));
}

/// Every half and bfloat16 comes back; floats around every one of them round to the nearest, ties to even.
Outcome halves() {
    bool right = true;
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        const auto pattern = static_cast<unsigned short>(bits);
        const float half = __half2float(__ushort_as_half(pattern)), bfloat = __bfloat162float(__ushort_as_bfloat16(pattern));
        right = right && __half_as_ushort(__float2half_rn(half)) == (std::isnan(half) ? 0x7fff : bits);
        right = right && (std::isnan(bfloat) || __bfloat16_as_ushort(__float2bfloat16_rn(bfloat)) == bits);
        if (std::isfinite(half)) {
            for (const float factor : {0.9997f, 1.00025f, 1.00048828125f, 0.99951171875f, 1.001f}) {
                const float value = half * factor, want = rounded(value, 10, -14);
                const float got = __half2float(__float2half_rn(value));
                right = right && (std::fabs(want) >= 65520 ? std::isinf(got) : got == want);
            }
        }
        if (std::isfinite(bfloat) && std::fabs(bfloat) < 1e38f && std::fabs(bfloat) > 1e-37f) {
            for (const float factor : {0.998f, 1.002f, 1.00390625f, 0.99609375f})
                right = right && __bfloat162float(__float2bfloat16_rn(bfloat * factor)) == rounded(bfloat * factor, 7, -126);
        }
    }
    const float2 pair = __half22float2(__floats2half2_rn(1.5f, -2.25f));
    const float2 other = __bfloat1622float2(__floats2bfloat162_rn(1.5f, -2.25f));
    return outcome_of(right && pair.x == 1.5f && pair.y == -2.25f && other.x == 1.5f && other.y == -2.25f);
}

__global__ void intrinsics_kernel(int* out) {
    out[0] = __popc(0xf0f0u) + __popcll(0xf0f0f0f0f0ull);
    out[1] = __ffs(0x50) + 100 * __ffs(0);
    out[2] = __clz(1) + 100 * __clz(0);
    out[3] = static_cast<int>(__umulhi(0x80000000u, 6)) + static_cast<int>(__umul64hi(1ull << 63, 14));
    out[4] = __float_as_int(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2.0f;
    out[5] = min(3, -2) * 100 + max(7, 9);
    out[6] = __fmaf_rn(1.0f + 0x1p-12f, 1.0f - 0x1p-12f, -1.0f) == -0x1p-24f;      // a product and a sum would give 0
    out[7] = __float2int_rn(2.5f);
}

int intrinsics_result(int i) {
    constexpr int kResults[] = {8 + 20, 5, 31 + 3200, 3 + 7, 1, -191, 1, 2};
    return kResults[i];
}

__global__ void copy_vectors_kernel(float* out, const float* values) {
    const unsigned at = 4 * threadIdx.x;
    float4 value = load_vector<float4>(values + at);
    value.x += load_vector_coherent<float2>(values + at + 2).y;
    if (threadIdx.x % 2)
        store_vector(out + at, value);
    else
        stream_vector(out + at, value);
}

Outcome vectors() {
    alignas(16) float values[128];
    for (int i = 0; i < 128; ++i) values[i] = static_cast<float>(i);
    return run_and_compare<copy_vectors_kernel, float>(1, 32, 0, 128, [](int i) { return i % 4 ? i : 2 * i + 3; }, values);
}

/// Each lane loads a float and stores it `stride` floats from its neighbour's.
__global__ void strided_kernel(float* out, const float* values, int stride) {
    for (int turn = 0; turn <= static_cast<int>(threadIdx.x % 2); ++turn)        // odd lanes come again, and load from one place
        stream_vector(out + stride * static_cast<int>(threadIdx.x), load_vector<float>(turn ? values : values + threadIdx.x));
}

/// 64 lanes load 4 bytes each from aligned 256, then 32 of them one value a warp. Stores are 64 and 32, by stride.
Outcome sectors() {
    struct Expected {
        int stride;
        std::int64_t stored_sectors;
    };
    alignas(32) float values[64] = {};
    alignas(32) static float out[64 * 16];
    bool right = true;
    for (const Expected expected : {Expected{1, 8 + 8}, Expected{2, 16 + 16}, Expected{8, 64 + 32}, Expected{16, 64 + 32}}) {
        simt::counts = {};
        simt::counts_traffic = true;
        right = right && launch<strided_kernel>(1, 64, 0, nullptr, out, values, expected.stride) == SL_OK;
        simt::counts_traffic = false;
        const simt::Efficiency &loads = simt::counts.loads, &stores = simt::counts.stores;
        right = right && loads.bytes == 4 * (64 + 2) && loads.sectors == 8 + 2;
        right = right && stores.bytes == 4 * (64 + 32) && stores.sectors == expected.stored_sectors;
    }
    return outcome_of(right);
}

/// Views of two types of the launch's shared memory, and a vector over elements. kWriters = 16: threads 0 and 8 write one element.
template <int kWriters>
__global__ void dynamic_shared_kernel(int* out) {
    const Shared<float> sums = dynamic_shared<float>(0, 64);
    const Shared<int> flags = dynamic_shared<int>(256, 16);
    const int me = static_cast<int>(threadIdx.x);
    sums.store(me, static_cast<float>(me));
    if (me < kWriters) flags.part(8, 8).store(me % 8, 3);
    __syncthreads();
    const float4 four = sums.part(32, 32).load_as<float4>(me / 4 % 8 * 4);
    out[me] = static_cast<int>(four.y) + flags.load(8 + me % 8);
}

template <int kWriters>
Outcome dynamic_views() {
    return run_and_compare<dynamic_shared_kernel<kWriters>, int>(2, 64, 320, 64, [](int i) { return 32 + i / 4 % 8 * 4 + 1 + 3; });
}

__global__ void half_exits_kernel(int* out) {
    SL_SHARED(int, values, 64);
    const int me = static_cast<int>(threadIdx.x);
    values.store(me, out[me]);
    if (me % 2) return;
    __syncthreads();
}

/// A launch that a fault ended leaves nothing behind: the next one, with other threads on the same stacks, is right.
Outcome after_faults() {
    for (int turn = 0; turn < 3; ++turn) {
        std::vector<int> values(64);
        const sl_status status = launch<half_exits_kernel>(1, 64, 0, nullptr, values.data());
        const std::string_view text = sl_error_text();
        if (status != SL_DEVICE_ERROR || text.find("divergent") == text.npos) return outcome_of(false);
        const Outcome outcome = dynamic_views<8>();
        if (outcome.status != SL_OK || !outcome.right || *simt::fault_text()) return outcome;
    }
    return {};
}

/// What is thrown becomes a status, or as a size minus a status: no fault of the caller's, which has a status of its own.
Outcome exceptions() {
    const auto gives = [](sl_status status, std::string_view text, auto body) {
        const auto sized = [&](int64_t& size) { return size = 7, body(); };
        if (guarded(body) != status || guarded_size(sized) != (status == SL_OK ? 7 : -status)) return false;
        return status == SL_OK || std::string_view(sl_error_text()) == text;
    };
    return outcome_of(gives(SL_OK, "", [] { return SL_OK; }) && gives(SL_BAD_ARGUMENT, "3", [] { return fail(SL_BAD_ARGUMENT, "%d", 3); }) &&
                      gives(SL_BAD_ARGUMENT, "too many", []() -> sl_status { throw std::invalid_argument("too many"); }) &&
                      gives(SL_NO_MEMORY, "out of memory", []() -> sl_status { throw std::bad_alloc(); }) &&
                      gives(SL_INTERNAL, "internal error: too long", []() -> sl_status { throw std::length_error("too long"); }) &&
                      gives(SL_INTERNAL, "internal error: an exception that is no std::exception", []() -> sl_status { throw 3; }));
}

/// Memory, copies and errors of the host's side, and what is counted.
Outcome runtime() {
    simt::counts = {};
    int device = -1, threads = 0;
    void* memory = nullptr;
    bool right = cudaGetDevice(&device) == cudaSuccess && device == 0 && cudaSetDevice(1) == cudaErrorInvalidDevice;
    right = right && cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerBlock, 0) == cudaSuccess && threads == 1024;
    right = right && cudaMalloc(&memory, 64) == cudaSuccess && reinterpret_cast<std::uintptr_t>(memory) % 256 == 0;
    int numbers[16];
    right = right && cudaMemsetAsync(memory, 1, 64, nullptr) == cudaSuccess;
    right = right && cudaMemcpyAsync(numbers, memory, 64, cudaMemcpyDeviceToHost, nullptr) == cudaSuccess && numbers[15] == 0x01010101;
    right = right && cudaStreamSynchronize(nullptr) == cudaSuccess && cudaFree(memory) == cudaSuccess;
    right = right && cudaHostAlloc(&memory, 8, cudaHostAllocPortable | cudaHostAllocMapped) == cudaSuccess && memory;
    right = right && cudaFreeHost(memory) == cudaSuccess;
    right = right && std::string_view(cudaGetErrorName(cudaErrorMisalignedAddress)) == "cudaErrorMisalignedAddress";
    int head = 0;
    std::vector<int> taken(64);
    right = right && launch<places_kernel>(1, 64, 0, nullptr, taken.data(), &head) == SL_OK;
    const simt::Counts& counts = simt::counts;
    return outcome_of(right && counts.launches == 1 && counts.blocks == 1 && counts.copies == 1 && counts.synchronizations == 1);
}

}  // namespace

const std::vector<Case> memory_cases = {
    {"atomics", [] { return run_and_compare<atomics_kernel, int>(2, 64, 0, 8, atomics_result); }},
    {"schedules", schedules},
    {"blocks", blocks},
    {"halves", halves},
    {"intrinsics", [] { return run_and_compare<intrinsics_kernel, int>(1, 1, 0, 8, intrinsics_result); }},
    {"vectors", vectors},
    {"sectors", sectors},
    {"dynamic shared", dynamic_views<8>},
    {"dynamic shared race", dynamic_views<16>},
    {"after faults", after_faults},
    {"exceptions", exceptions},
    {"runtime", runtime},
};

}  // namespace sparselift::cuda
