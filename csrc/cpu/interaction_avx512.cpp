// The interaction kernels for AVX-512 (F, VL, BW, DQ).
#include "interaction.h"
#include "vec_avx512.h"

namespace sparselift {
namespace avx512 {

constexpr int kRowTile = 8;

#include "interaction_body.h"

}  // namespace avx512
}  // namespace sparselift
