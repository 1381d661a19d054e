// Rows in int8: the range of a row is cut into steps, from its least element on. Constants alone, since this is included by sources compiled
// with different instruction sets.
#pragma once

namespace sparselift {

constexpr float kSteps = 255.0f;
constexpr float kLeastRange = 0x1p-118f;      // below, there is no normal step: such a row is its least element

}  // namespace sparselift
