// The interaction kernels for any processor.
#include "interaction.h"
#include "vec_portable.h"

namespace sparselift {
namespace portable {

constexpr int kRowTile = 6;

#include "interaction_body.h"

}  // namespace portable
}  // namespace sparselift
