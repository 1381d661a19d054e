// Small tables of structs from the host into device memory, as arguments of a launch: ordered with the stream, without a copy engine,
// and with nothing for the host to keep alive. Grid: a thread a word.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int32_t kPutWords = 960;      // an argument list holds 4 KiB

struct PutArgs {
    uint32_t* to;
    uint32_t* zeros;           // words that are zeroed on the way
    int32_t count;
    int32_t num_zeros;
    uint32_t words[kPutWords];
};

__global__ void __launch_bounds__(kPutWords) put_kernel(const __grid_constant__ PutArgs args) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < args.count) args.to[thread] = args.words[thread];
    for (int32_t i = thread; i < args.num_zeros; i += static_cast<int32_t>(blockDim.x)) args.zeros[i] = 0;
}

}  // namespace sparselift::cuda
