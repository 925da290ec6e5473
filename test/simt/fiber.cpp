// fiber.h. Compiled without sanitizers.
#include "simt/fiber.h"

#include <sys/mman.h>

#include <boost/context/protected_fixedsize_stack.hpp>
#include <deque>
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

// Of address space: pages that are not touched cost no memory. (ThreadSanitizer pays for all of it.)
#ifdef SIMT_THREAD
constexpr std::size_t stack_bytes = 64 << 10;
#else
constexpr std::size_t stack_bytes = 256 << 10;
#endif

// Stacks, each with a guard page, are used again: mapping one takes longer than most threads run.
class StackPool {
  public:
    stack_context take() {
        if (free_.empty()) return boost::context::protected_fixedsize_stack(stack_bytes).allocate();
        const stack_context stack = free_.back();
        free_.pop_back();
#ifdef SIMT_THREAD
        // Mapped anew, ThreadSanitizer forgets who used it before.
        mmap(bottom(stack), stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
             0);
#endif
        return stack;
    }
    void give_back(const stack_context& stack) { free_.push_back(stack); }

    static void* bottom(const stack_context& stack) { return static_cast<char*>(stack.sp) - stack_bytes; }

  private:
    std::vector<stack_context> free_;
};

StackPool& stacks() {
    static StackPool pool;
    return pool;
}

// The stack belongs to the Fiber, not to Boost's object.
struct KeepsStack {
    stack_context allocate() { return {}; }
    void deallocate(stack_context&) {}
};

// What the sanitizers call the thread that is no fiber.
struct Host {
    void* address_stack = nullptr;
    const void* stack_bottom = nullptr;
    std::size_t stack_size = 0;
    void* thread_fiber = nullptr;
} host;

#ifdef SIMT_THREAD
// The fibers that ended last. ThreadSanitizer gives a dead one's number to the next, and would take the two for
// one thread, which has no races with itself.
std::deque<void*> dead_fibers;
#endif

// On the fiber's stack, after a switch to it.
void arrive_on(void* sanitizer_stack) {
#ifdef SIMT_ADDRESS
    __sanitizer_finish_switch_fiber(sanitizer_stack, &host.stack_bottom, &host.stack_size);
#else
    (void)sanitizer_stack;
#endif
}

// On the fiber's stack, before a switch to the host. `kept`: null where the fiber ends.
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

Fiber::Fiber(std::function<void()> function) : stack_(stacks().take()), function_(std::move(function)) {
    const boost::context::preallocated place(stack_.sp, stack_.size, stack_);
    context_ = boost::context::fiber(std::allocator_arg, place, KeepsStack{},
                                     [this](boost::context::fiber&& to_host) {
                                         context_ = std::move(to_host);
                                         arrive_on(nullptr);
                                         function_();
                                         leave_for_host(nullptr);
                                         return std::move(context_);
                                     });
#ifdef SIMT_THREAD
    sanitizer_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef SIMT_THREAD
    constexpr std::size_t kept = 2048;
    dead_fibers.push_back(sanitizer_fiber_);
    if (dead_fibers.size() > kept) {
        __tsan_destroy_fiber(dead_fibers.front());
        dead_fibers.pop_front();
    }
#endif
    stacks().give_back(stack_);
}

void Fiber::resume() {
#ifdef SIMT_ADDRESS
    __sanitizer_start_switch_fiber(&host.address_stack, StackPool::bottom(stack_), stack_bytes);
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
