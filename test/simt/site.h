// The place in a kernel where a thread of the executor waits, reads or fails.
#pragma once

#include <source_location>
#include <string>

namespace simt {

// A line, and the functions through which the thread came there from its kernel.
struct Site {
    // Not explicit: g++ 12 uses the caller's line only if std::source_location::current() is the whole
    // default argument.
    Site(const std::source_location& line_ = {}, const Site* caller_ = nullptr)
        : line(line_), caller(caller_) {}
    std::source_location line;
    const Site* caller;  // lies on the thread's stack while it waits
};

// The lines, from the kernel's own to the last.
std::string text(const Site& site);

// Whether all lines are the same.
bool same_place(const Site& first, const Site& second);

// The line of the kernel itself.
std::source_location line_of_kernel(const Site& site);

}  // namespace simt
