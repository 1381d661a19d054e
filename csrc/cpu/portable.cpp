// The kernels for any processor.
#include "kernels.h"
#include "vec_portable.h"

namespace sparselift {
namespace portable {

constexpr int kMaxVectors = 8;

#include "kernel_body.h"

}  // namespace portable
}  // namespace sparselift
