// Errors. Two kinds, never mixed:
//   user_error   what the user gave wrongly: one line that says what, why and what would do. The program
//                prints it once for all ranks as `error: ...` and exits with status 1.
//   check        a broken promise inside the program: stops with file and line.
#pragma once

#include <fmt/core.h>

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace llmc {

// What the user gave wrongly; what() is the line to print, without the leading "error: ".
class UserError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void user_error(fmt::format_string<Args...> format, Args&&... args) {
    throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

// What `f` returns; a UserError of it begins with the option that is to blame: "--init: cannot open x".
template <class F>
decltype(auto) naming_option(std::string_view option, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const UserError& fault) {
        user_error("{}: {}", option, fault.what());
    }
}

// A fault of the program itself.
class ProgrammingError : public std::logic_error {
  public:
    using std::logic_error::logic_error;
};

[[noreturn]] inline void programming_error(std::string_view what,
                                           std::source_location where = std::source_location::current()) {
    throw ProgrammingError(fmt::format("{}:{}: {}", where.file_name(), where.line(), what));
}

inline void check(bool condition, std::string_view what,
                  std::source_location where = std::source_location::current()) {
    if (!condition) programming_error(what, where);
}

}  // namespace llmc
