// fiber.h. Compiled without sanitizers.
#include "simt/fiber.h"

#include <array>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <utility>
#include <vector>

#ifdef SIMT_ADDRESS
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SIMT_THREAD
#include <sanitizer/tsan_interface.h>
#endif

namespace simt {
namespace {

using boost::context::stack_context;

// Bytes of address space. Pages that are not touched use no memory.
constexpr std::size_t stack_bytes = 256 << 10;
constexpr std::size_t page_bytes = 4096, line_bytes = 64;

// The stack that a fiber runs on. Seats are reused, because making one takes longer than most threads run.
// Each turn has its own seats.
struct Seat {
    stack_context stack;              // with a guard page
    void* sanitizer_fiber = nullptr;  // ThreadSanitizer treats it as a thread
};

Seat new_seat() {
    Seat seat{boost::context::protected_fixedsize_stack(stack_bytes).allocate(), nullptr};
    // Stacks begin at whole pages. Without an offset, their ends would all share a few sets of the cache.
    static std::size_t seats = 0;
    const std::size_t moved = seats++ % (page_bytes / line_bytes) * line_bytes;
    seat.stack.sp = static_cast<char*>(seat.stack.sp) - moved;
    seat.stack.size -= moved;
#ifdef SIMT_THREAD
    seat.sanitizer_fiber = __tsan_create_fiber(0);
#endif
    return seat;
}

std::vector<Seat>& free_seats(unsigned turn) {
    static std::array<std::vector<Seat>, Fiber::turns> seats;
    return seats[turn % Fiber::turns];
}

Seat take_seat(unsigned turn) {
    auto& seats = free_seats(turn);
    if (seats.empty()) return new_seat();
    const Seat seat = seats.back();
    seats.pop_back();
    return seat;
}

// The Fiber owns the stack, not Boost's object.
struct KeepsStack {
    stack_context allocate() { return {}; }
    void deallocate(stack_context&) {}
};

// The sanitizers' data of the host thread, which is not a fiber.
struct Host {
    void* address_stack = nullptr;
    const void* stack_bottom = nullptr;
    std::size_t stack_size = 0;
    void* thread_fiber = nullptr;
} host;

// On the fiber's stack, after a switch to it.
void arrive_on(void* sanitizer_stack) {
#ifdef SIMT_ADDRESS
    __sanitizer_finish_switch_fiber(sanitizer_stack, &host.stack_bottom, &host.stack_size);
#else
    (void)sanitizer_stack;
#endif
}

// On the fiber's stack, before a switch to the host. `kept` is null if the fiber ends.
void leave_for_host(void** kept) {
#ifdef SIMT_ADDRESS
    __sanitizer_start_switch_fiber(kept, host.stack_bottom, host.stack_size);
#else
    (void)kept;
#endif
#ifdef SIMT_THREAD
    __tsan_switch_to_fiber(host.thread_fiber, __tsan_switch_to_fiber_no_sync);
#endif
}

}  // namespace

Fiber::Fiber(unsigned turn, std::function<void()> function) : turn_(turn), function_(std::move(function)) {
    const Seat seat = take_seat(turn);
    stack_ = seat.stack;
    sanitizer_fiber_ = seat.sanitizer_fiber;
    const boost::context::preallocated place(stack_.sp, stack_.size, stack_);
    context_ = boost::context::fiber(std::allocator_arg, place, KeepsStack{},
                                     [this](boost::context::fiber&& to_host) {
                                         context_ = std::move(to_host);
                                         arrive_on(nullptr);
                                         function_();
                                         leave_for_host(nullptr);
                                         return std::move(context_);
                                     });
}

Fiber::~Fiber() { free_seats(turn_).push_back({stack_, sanitizer_fiber_}); }

void Fiber::resume() {
#ifdef SIMT_ADDRESS
    __sanitizer_start_switch_fiber(&host.address_stack, static_cast<char*>(stack_.sp) - stack_.size,
                                   stack_.size);
#endif
#ifdef SIMT_THREAD
    host.thread_fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_fiber_, __tsan_switch_to_fiber_no_sync);
#endif
    context_ = std::move(context_).resume();
#ifdef SIMT_ADDRESS
    __sanitizer_finish_switch_fiber(host.address_stack, nullptr, nullptr);
#endif
}

void Fiber::suspend() {
    leave_for_host(&sanitizer_stack_);
    context_ = std::move(context_).resume();
    arrive_on(sanitizer_stack_);
}

#ifdef SIMT_THREAD
extern "C" void __tsan_ignore_thread_begin();  // in its runtime, but in no header
extern "C" void __tsan_ignore_thread_end();
void release_to(void* place) { __tsan_release(place); }
void acquire_from(void* place) { __tsan_acquire(place); }
void begin_unseen() { __tsan_ignore_thread_begin(); }
void end_unseen() { __tsan_ignore_thread_end(); }
#else
void release_to(void*) {}
void acquire_from(void*) {}
void begin_unseen() {}
void end_unseen() {}
#endif

}  // namespace simt
