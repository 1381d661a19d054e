// What the loops of every instruction set share: plain types, and how a function of theirs is declared.
#pragma once

#include <stdint.h>

/// Always: a helper that stays a call takes the address of its caller's arguments, which then live in memory that every store may have
/// changed. It costs up to a third of an update.
#define SL_INLINE inline __attribute__((always_inline))

namespace sparselift {

/// Elements of 16 bits: IEEE half precision, and the upper half of a float.
struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

}  // namespace sparselift
