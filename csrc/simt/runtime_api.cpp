#include "runtime_api.h"

#include <cstdlib>
#include <cstring>

#include "machine.h"

using sparselift::simt::counts;

namespace {

struct ErrorText {
    cudaError_t error;
    const char* name;
    const char* text;
};

constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

const ErrorText* find(cudaError_t error) {
    for (const ErrorText& entry : kErrors)
        if (entry.error == error) return &entry;
    return nullptr;
}

constexpr std::size_t kDeviceAlignment = 256;    // what cudaMalloc promises

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
    const ErrorText* entry = find(error);
    return entry ? entry->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
    const ErrorText* entry = find(error);
    return entry ? entry->text : "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device != 0) return cudaErrorInvalidDevice;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = sparselift::simt::kMaxThreads; return cudaSuccess;
        case cudaDevAttrWarpSize: *value = 32; return cudaSuccess;
        case cudaDevAttrMultiProcessorCount: *value = 2; return cudaSuccess;       // so that small grids take more than one wave
        case cudaDevAttrComputeCapabilityMajor: *value = 8; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(sparselift::simt::SharedMemory::kBlockBytes);
            return cudaSuccess;
    }
    return cudaErrorInvalidValue;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    return posix_memalign(memory, kDeviceAlignment, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }

cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
    ++counts.copies;
    if (bytes) std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int byte, std::size_t bytes, cudaStream_t) {
    if (bytes) std::memset(memory, byte, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = nullptr;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    ++counts.synchronizations;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    ++counts.synchronizations;
    return cudaSuccess;
}
