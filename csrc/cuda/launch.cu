#include "launch.cuh"

namespace sparselift::cuda {

sl_status check_launch(cudaError_t error, std::string_view kernel, const LaunchShape& shape) {
    if (error == cudaSuccess) return SL_OK;
#ifdef SPARSELIFT_SIMT
    const char* text = *simt::fault_text() ? simt::fault_text() : cudaGetErrorString(error);
#else
    const char* text = cudaGetErrorString(error);
#endif
    return fail(SL_DEVICE_ERROR, "%s in %.*s (grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory): %s",
                cudaGetErrorName(error), static_cast<int>(kernel.size()), kernel.data(), shape.grid.x, shape.grid.y, shape.grid.z,
                shape.block.x, shape.block.y, shape.block.z, shape.shared_bytes, text);
}

}  // namespace sparselift::cuda
