// A fiber: a function with a stack of its own that runs until it suspends itself. Boost.Context switches; what
// is added here is what AddressSanitizer and ThreadSanitizer have to be told (SIMT_ADDRESS, SIMT_THREAD).
#pragma once

#include <boost/context/fiber.hpp>
#include <functional>

namespace simt {

class Fiber {
  public:
    // Fibers of one turn come after each other for ThreadSanitizer, where a later one sits in an earlier one's seat;
    // those of the next three turns have seats of their own, and nothing orders them.
    static constexpr unsigned turns = 4;
    Fiber(unsigned turn, std::function<void()> function);
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    void resume();   // by the host: returns when the fiber suspends or its function ends
    void suspend();  // by the fiber

  private:
    boost::context::fiber context_;  // of the fiber while the host runs, and the other way round
    boost::context::stack_context stack_;
    unsigned turn_;
    std::function<void()> function_;
    void* sanitizer_stack_ = nullptr;  // AddressSanitizer's, of this fiber while it is suspended
    void* sanitizer_fiber_ = nullptr;  // ThreadSanitizer's
};

// Set where ThreadSanitizer runs; without it the rest of this file does nothing.
#ifdef SIMT_THREAD
inline constexpr bool finds_races = true;
#else
inline constexpr bool finds_races = false;
#endif

// What a thread did before release_to(p) happens before what another does after its acquire_from(p).
void release_to(void* place);
void acquire_from(void* place);

// Between the two ThreadSanitizer sees no access of the thread: the executor's own are not the kernel's.
void begin_unseen();
void end_unseen();

class Unseen {
  public:
    Unseen() { begin_unseen(); }
    ~Unseen() { end_unseen(); }
    Unseen(const Unseen&) = delete;
    Unseen& operator=(const Unseen&) = delete;
};

}  // namespace simt
