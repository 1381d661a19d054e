// Fibers: stacks of our own between which one OS thread switches by hand.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(SPARSELIFT_SIMT_UCONTEXT)
#define SPARSELIFT_SIMT_UCONTEXT
#endif
#ifdef SPARSELIFT_SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace sparselift::simt {

/// A suspended thread of control. The fiber that stands for the OS thread's own stack has stack_bottom = nullptr until it first leaves it.
struct Fiber {
#ifdef SPARSELIFT_SIMT_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer = nullptr;
#endif
    const void* stack_bottom = nullptr;
    std::size_t stack_bytes = 0;
    void* sanitizer_stack = nullptr;    // AddressSanitizer's frames of a suspended fiber
};

/// Equal stacks, each above a page that faults, so that an overflow stops instead of writing into a neighbour.
class Stacks {
  public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    /// At least `count` stacks; false when memory is out. Fibers on earlier stacks are gone.
    bool reserve(int count);

    /// Makes `fiber` start `entry` on stack `index` at the next switch to it, whatever ran there before.
    void prepare(Fiber& fiber, int index, void (*entry)());

    /// Says that no fiber on these stacks will be resumed, though some have not ended: their red zones go.
    void abandon();

  private:
    char* memory_ = nullptr;
    int count_ = 0;
};

/// Suspends `from`, the fiber that runs, and goes on with `to`.
void switch_fiber(Fiber& from, Fiber& to);

/// The same for a fiber that will not be resumed.
[[noreturn]] void leave_fiber(Fiber& from, Fiber& to);

/// The first thing that a fiber's entry calls. `previous` is the fiber that switched to it.
void enter_fiber(Fiber& previous);

}  // namespace sparselift::simt
