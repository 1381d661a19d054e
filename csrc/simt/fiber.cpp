#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace sparselift::simt {
namespace {

constexpr std::size_t kPageBytes = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 256 << 10;    // red zones make frames several times as large
#else
constexpr std::size_t kStackBytes = 64 << 10;
#endif
constexpr std::size_t kSlotBytes = kStackBytes + kPageBytes;

// AddressSanitizer must know on which stack the program is, or it takes every address of a fiber for a wild one.
void announce_switch([[maybe_unused]] void** leaving, [[maybe_unused]] const Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(leaving, to.stack_bottom, to.stack_bytes);
#endif
}

void finish_switch([[maybe_unused]] void* resumed, [[maybe_unused]] Fiber* previous) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(resumed, &bottom, &bytes);
    if (previous && !previous->stack_bottom) {
        previous->stack_bottom = bottom;
        previous->stack_bytes = bytes;
    }
#endif
}

}  // namespace

#ifdef SPARSELIFT_SIMT_UCONTEXT

static void jump(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

static void set_up(Fiber& fiber, char* stack, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

#else

// swapcontext makes a system call for the signal mask, which is all that a switch costs. This one keeps what the ABI says a call
// keeps: rbp, rbx, r12 to r15 and the stack pointer (kernels leave the rounding mode alone).
extern "C" void sparselift_simt_jump(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.p2align 4
.hidden sparselift_simt_jump
.globl sparselift_simt_jump
.type sparselift_simt_jump, @function
sparselift_simt_jump:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sparselift_simt_jump, .-sparselift_simt_jump
)");

static void jump(Fiber& from, Fiber& to) { sparselift_simt_jump(&from.stack_pointer, to.stack_pointer); }

static void set_up(Fiber& fiber, char* stack, void (*entry)()) {
    constexpr int kSavedRegisters = 6;
    // The return into `entry` must leave the stack pointer 8 below a multiple of 16, as a call would.
    auto* top = reinterpret_cast<std::uintptr_t*>(stack + kStackBytes) - 1;
    *top = 0;                                                // where `entry` would return to: it never does
    *--top = reinterpret_cast<std::uintptr_t>(entry);
    top -= kSavedRegisters;
    std::memset(top, 0, kSavedRegisters * sizeof *top);
    fiber.stack_pointer = top;
}

#endif

Stacks::~Stacks() {
    if (memory_) munmap(memory_, static_cast<std::size_t>(count_) * kSlotBytes);
}

bool Stacks::reserve(int count) {
    if (count <= count_) return true;
    const std::size_t bytes = static_cast<std::size_t>(count) * kSlotBytes;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (memory_) munmap(memory_, static_cast<std::size_t>(count_) * kSlotBytes);
    memory_ = static_cast<char*>(memory);
    count_ = count;
    for (int i = 0; i < count; ++i) mprotect(memory_ + static_cast<std::size_t>(i) * kSlotBytes, kPageBytes, PROT_NONE);
    return true;
}

void Stacks::prepare(Fiber& fiber, int index, void (*entry)()) {
    char* stack = memory_ + static_cast<std::size_t>(index) * kSlotBytes + kPageBytes;
    fiber.stack_bottom = stack;
    fiber.stack_bytes = kStackBytes;
    fiber.sanitizer_stack = nullptr;
    set_up(fiber, stack, entry);
}

void Stacks::abandon() {
#if defined(__SANITIZE_ADDRESS__)
    for (int i = 0; i < count_; ++i)
        __asan_unpoison_memory_region(memory_ + static_cast<std::size_t>(i) * kSlotBytes + kPageBytes, kStackBytes);
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
    announce_switch(&from.sanitizer_stack, to);
    jump(from, to);
    finish_switch(from.sanitizer_stack, nullptr);
}

void leave_fiber(Fiber& from, Fiber& to) {
    announce_switch(nullptr, to);
    jump(from, to);
    std::abort();                                            // somebody resumed a fiber that had ended
}

void enter_fiber(Fiber& previous) { finish_switch(nullptr, &previous); }

}  // namespace sparselift::simt
