// Integer atomics on global memory, for the types that CUDA has them for. One fiber runs at a time, so a plain read and write is atomic;
// what another thread may do in between comes from the schedule point before. Floating-point atomics are absent: sums must not depend on
// the order of threads.
#pragma once

#include <type_traits>

#include "machine.h"

namespace sparselift::simt {

template <typename T, typename... Types>
inline constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);

template <typename T>
using atomic_t = std::enable_if_t<is_one_of<T, int, unsigned, unsigned long long>, T>;
template <typename T>
using ordered_atomic_t = std::enable_if_t<is_one_of<T, int, unsigned, long long, unsigned long long>, T>;

/// Keeps a parameter out of deduction: atomicAdd(counter, 1) is of the counter's type.
template <typename T>
struct identity {
    using type = T;
};
template <typename T>
using identity_t = typename identity<T>::type;

template <typename T, typename Update>
T update_atomically(T* address, const Update& update) {
    schedule_point();
    const T old = *address;
    *address = update(old);
    return old;
}

template <typename T>
T wrapping_sum(T a, T b) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
}

}  // namespace sparselift::simt

template <typename T>
sparselift::simt::atomic_t<T> atomicAdd(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return sparselift::simt::wrapping_sum(old, value); });
}

template <typename T>
sparselift::simt::ordered_atomic_t<T> atomicMin(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return value < old ? value : old; });
}

template <typename T>
sparselift::simt::ordered_atomic_t<T> atomicMax(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return value > old ? value : old; });
}

template <typename T>
sparselift::simt::atomic_t<T> atomicAnd(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return old & value; });
}

template <typename T>
sparselift::simt::atomic_t<T> atomicOr(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return old | value; });
}

template <typename T>
sparselift::simt::atomic_t<T> atomicExch(T* address, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T) { return value; });
}

template <typename T>
sparselift::simt::atomic_t<T> atomicCAS(T* address, sparselift::simt::identity_t<T> expected, sparselift::simt::identity_t<T> value) {
    return sparselift::simt::update_atomically(address, [&](T old) { return old == expected ? value : old; });
}
