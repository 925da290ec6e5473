// A fiber: a function with its own stack that runs until it suspends itself. Boost.Context does the switches.
// This code adds the calls that AddressSanitizer and ThreadSanitizer need (SIMT_ADDRESS, SIMT_THREAD).
#pragma once

#include <boost/context/fiber.hpp>
#include <functional>

namespace simt {

class Fiber {
  public:
    // A turn is the number of a block. A seat is a stack that fibers reuse (fiber.cpp). ThreadSanitizer sees
    // fibers that use the same seat as ordered. Fibers of the next three turns have other seats, so nothing
    // orders them.
    static constexpr unsigned turns = 4;
    Fiber(unsigned turn, std::function<void()> function);
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    void resume();   // by the host: returns when the fiber suspends or its function ends
    void suspend();  // by the fiber

  private:
    boost::context::fiber context_;  // the fiber's context while the host runs, and the host's while the
                                     // fiber runs
    boost::context::stack_context stack_;
    unsigned turn_;
    std::function<void()> function_;
    void* sanitizer_stack_ = nullptr;  // AddressSanitizer's data of this fiber while it is suspended
    void* sanitizer_fiber_ = nullptr;  // ThreadSanitizer's
};

// Set if ThreadSanitizer runs. Without it the rest of this file does nothing.
#ifdef SIMT_THREAD
inline constexpr bool finds_races = true;
#else
inline constexpr bool finds_races = false;
#endif

// Everything that a thread did before release_to(p) happens before everything that another does after
// acquire_from(p).
void release_to(void* place);
void acquire_from(void* place);

// Between the two, ThreadSanitizer ignores the thread's accesses: they are the executor's, not the kernel's.
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
