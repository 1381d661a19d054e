// Small tables of structs from the host into device memory, as arguments of a launch: ordered with the stream, without a copy engine,
// and with nothing for the host to keep alive. Grid: a thread a word.
#pragma once

#include "args.h"
#include "platform.h"

namespace sparselift::cuda {

constexpr int32_t kPutWords = 960;      // an argument list holds 4 KiB

struct PutArgs {
    uint32_t* to;
    int32_t count;
    uint32_t words[kPutWords];
};

__global__ void __launch_bounds__(kPutWords) put_kernel(const __grid_constant__ PutArgs args) {
    const auto i = static_cast<int32_t>(threadIdx.x);
    if (i < args.count) args.to[i] = args.words[i];
}

}  // namespace sparselift::cuda
