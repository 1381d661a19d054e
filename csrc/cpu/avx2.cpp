// The kernels for AVX2 with FMA and F16C.
#include "kernels.h"
#include "vec_avx2.h"

namespace sparselift {
namespace avx2 {

constexpr int kMaxVectors = 8;

#include "kernel_body.h"

}  // namespace avx2
}  // namespace sparselift
