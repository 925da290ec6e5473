// Two parts of C++20's library. Debian 12's clang 14 cannot compile them from the headers of g++ 12.
#pragma once

#include <iterator>
#include <version>

#ifdef __cpp_lib_source_location
#include <source_location>
#else
#include <experimental/source_location>
#endif

namespace llmc {

#ifdef __cpp_lib_source_location
using SourceLocation = std::source_location;
#else
using SourceLocation = std::experimental::source_location;
#endif

// The elements of `list`, the last one first; in place of std::views::reverse. The list must outlive it.
template <class List>
class Reversed {
  public:
    explicit Reversed(List& list) : list_(list) {}
    auto begin() const { return std::rbegin(list_); }
    auto end() const { return std::rend(list_); }

  private:
    List& list_;
};

}  // namespace llmc
