// The interaction kernels for AVX2 with FMA and F16C.
#include "interaction.h"
#include "vec_avx2.h"

namespace sparselift {
namespace avx2 {

constexpr int kRowTile = 6;

#include "interaction_body.h"

}  // namespace avx2
}  // namespace sparselift
