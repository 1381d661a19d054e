// The only place that launches kernels. Every launch is checked, and a failure names CUDA's error, the kernel and the launch.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

#include "../api/status.h"
#include "platform.h"

namespace sparselift::cuda {

/// The name of a kernel with its template arguments, from the compiler.
template <auto kKernel>
constexpr std::string_view kernel_name() {
    const std::string_view text = __PRETTY_FUNCTION__;
    constexpr std::string_view kBefore = "kKernel = ";
    const std::size_t begin = text.find(kBefore) + kBefore.size();
    return text.substr(begin, text.find_first_of(";]", begin) - begin);
}

struct LaunchShape {
    dim3 grid, block;
    std::size_t shared_bytes;
};

/// SL_OK, or SL_DEVICE_ERROR with a text.
sl_status check_launch(cudaError_t error, std::string_view kernel, const LaunchShape& shape);

namespace detail {

/// What a kernel has without asking, static and dynamic shared memory together, and more than any of ours has static.
constexpr std::size_t kDefaultSharedBytes = 48 << 10, kMostStaticBytes = 36 << 10;

/// Keeps arguments out of deduction, so that they convert to what the kernel takes.
template <typename T>
struct Parameter {
    using type = T;
};

template <auto kKernel, typename... Parameters>
sl_status launch(void (*)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                 typename Parameter<Parameters>::type... arguments) {
    static_assert((sizeof(Parameters) + ... + 0) <= 32764, "a kernel takes at most 32,764 bytes of arguments");
    if (shape.shared_bytes > kDefaultSharedBytes - kMostStaticBytes) {
        const cudaError_t error =
            cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
        if (error != cudaSuccess) return check_launch(error, kernel_name<kKernel>(), shape);
    }
#ifdef SPARSELIFT_SIMT
    simt::note_launch(kernel_name<kKernel>());
    const auto body = [&] { kKernel(arguments...); };
    const cudaError_t error = simt::run_grid(
        shape.grid, shape.block, shape.shared_bytes, [](const void* closure) { (*static_cast<const decltype(body)*>(closure))(); }, &body);
    static_cast<void>(stream);
#else
    kKernel<<<shape.grid, shape.block, shape.shared_bytes, stream>>>(arguments...);
    const cudaError_t error = cudaGetLastError();
#endif
    return check_launch(error, kernel_name<kKernel>(), shape);
}

}  // namespace detail

/// Queues kKernel<<<grid, block, shared_bytes, stream>>>(arguments...). An empty grid is an error, as in CUDA.
template <auto kKernel, typename... Arguments>
sl_status launch(dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
    return detail::launch<kKernel>(kKernel, LaunchShape{grid, block, shared_bytes}, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace sparselift::cuda
