// The interaction kernels for any processor, in the compiler's own vectors. A product and a sum are rounded each: a call of fmaf, where the
// processor has no such instruction, takes ten times as long, and nothing promises the other builds' bits.
#include "interaction.h"

namespace sparselift {
namespace portable {

typedef float Vec __attribute__((vector_size(16)));
typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
using Mask = int;      // leading lanes
constexpr int kWidth = 4;
constexpr int kRowTile = 6;

static inline Vec zero() { return Vec{0, 0, 0, 0}; }
static inline Vec splat(float x) { return Vec{x, x, x, x}; }
static inline Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
static inline Vec load_part(const float* p, Mask lanes) {
    Vec x = zero();
    for (int i = 0; i < lanes; ++i) x[i] = p[i];
    return x;
}
static inline void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
static inline void store_part(float* p, Mask lanes, Vec x) {
    for (int i = 0; i < lanes; ++i) p[i] = x[i];
}
static inline Vec add(Vec a, Vec b) { return a + b; }
static inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
static inline Mask mask_for(int64_t lanes) { return static_cast<Mask>(lanes); }
static inline void transpose(Vec (&tile)[kWidth]) {
    const Vec a = tile[0], b = tile[1], c = tile[2], d = tile[3];
    for (int i = 0; i < kWidth; ++i) tile[i] = Vec{a[i], b[i], c[i], d[i]};
}

#include "interaction_body.h"

}  // namespace portable
}  // namespace sparselift
