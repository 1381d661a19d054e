// Small tables of structs from the host into device memory, as arguments of a launch: ordered with the stream, without a copy engine,
// and with nothing for the host to keep alive. Grid: one block.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int32_t kPutWords = 960, kMostPutWords = 8000;       // 4 KiB of arguments, or, where that is not enough, 32 KiB (CUDA 12.1)

template <int kWords>
struct PutArgs {
    uint32_t* to;
    uint32_t* zeros;           // words that are zeroed on the way
    int32_t count;
    int32_t num_zeros;
    uint32_t words[kWords];
};

template <int kWords>
__global__ void __launch_bounds__(kMaxThreads) put_kernel(const __grid_constant__ PutArgs<kWords> args) {
    const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
    for (int32_t i = thread; i < args.count; i += threads) args.to[i] = args.words[i];
    for (int32_t i = thread; i < args.num_zeros; i += threads) args.zeros[i] = 0;
}

}  // namespace sparselift::cuda
