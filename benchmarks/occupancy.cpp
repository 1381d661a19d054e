// Theoretical occupancy by NVIDIA's own header. Lines in: compute capability, registers a thread, static shared bytes, threads a block.
// Lines out: percent of the multiprocessor's warps.
#include <cuda_occupancy.h>

#include <cstdio>

struct Device {
    int major;
    std::size_t shared_per_multiprocessor, shared_per_block_optin;
    int multiprocessors;
};

// A100, H100 (and H200), B200: what cudaGetDeviceProperties says of them. All have 64 Ki registers and 64 warps a multiprocessor.
constexpr Device kDevices[] = {{8, 164 << 10, 163 << 10, 108}, {9, 228 << 10, 227 << 10, 132}, {10, 228 << 10, 227 << 10, 148}};

static cudaOccDeviceProp properties(const Device& device) {
    cudaOccDeviceProp all;
    all.computeMajor = device.major;
    all.computeMinor = 0;
    all.maxThreadsPerBlock = 1024;
    all.maxThreadsPerMultiprocessor = 2048;
    all.regsPerBlock = all.regsPerMultiprocessor = 64 << 10;
    all.warpSize = 32;
    all.sharedMemPerBlock = 48 << 10;
    all.sharedMemPerMultiprocessor = device.shared_per_multiprocessor;
    all.sharedMemPerBlockOptin = device.shared_per_block_optin;
    all.reservedSharedMemPerBlock = 1 << 10;
    all.numSms = device.multiprocessors;
    return all;
}

int main() {
    int major, registers, threads;
    std::size_t shared;
    while (std::scanf("%d %d %zu %d", &major, &registers, &shared, &threads) == 4) {
        const Device* device = nullptr;
        for (const Device& known : kDevices)
            if (known.major == major) device = &known;
        if (!device) return 1;
        const cudaOccDeviceProp all = properties(*device);
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = shared;
        cudaOccResult result;
        const cudaOccDeviceState state;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &all, &kernel, &state, threads, 0) != CUDA_OCC_SUCCESS) return 2;
        std::printf("%d\n", 100 * result.activeBlocksPerMultiprocessor * ((threads + 31) / 32) / 64);
    }
}
