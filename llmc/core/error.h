// Two kinds of errors:
//   user_error   a mistake of the user: one line that says what is wrong, why, and what to do. The program
//                prints it once for all ranks as `error: ...` and exits with status 1.
//   check        a broken assumption inside the program: the program stops with file and line. The text states
//                the condition that must hold, not its violation.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/core/standard_library.h"

namespace llmc {

// A mistake of the user; what() is the line to print, without the leading "error: ".
class UserError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// One that all ranks find at the same place, so that they can still act together.
class SharedError : public UserError {
  public:
    using UserError::UserError;
};

// The mistake that a file is missing.
class MissingFile : public UserError {
  public:
    using UserError::UserError;
};

template <class... Args>
[[noreturn]] void user_error(fmt::format_string<Args...> format, Args&&... args) {
    throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void shared_error(fmt::format_string<Args...> format, Args&&... args) {
    throw SharedError(fmt::format(format, std::forward<Args>(args)...));
}

// A rule that no run may break, as the division of heads among ranks: what it is about, the value that breaks it
// and the nearest limit, both counts, and the options that mend it ("--tensor-parallel 4"; empty if none is known).
struct Rule {
    std::string rule{};
    std::int64_t value = 0, limit = 0;
    std::string change{};
};

// The mistake that the options break a rule. A run ends with its line; a plan explains it.
class BrokenRule : public UserError {
  public:
    BrokenRule(Rule broken, const std::string& line) : UserError(line), rule(std::move(broken)) {}
    Rule rule;
};

template <class... Args>
[[noreturn]] void refuse(Rule broken, fmt::format_string<Args...> format, Args&&... args) {
    throw BrokenRule(std::move(broken), fmt::format(format, std::forward<Args>(args)...));
}

// Returns what `f` returns. If it throws a UserError, the message gets the option as a prefix: "--init:
// cannot open x".
template <class F>
decltype(auto) naming_option(std::string_view option, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const UserError& fault) {
        user_error("{}: {}", option, fault.what());
    }
}

// A bug of the program itself.
class ProgrammingError : public std::logic_error {
  public:
    using std::logic_error::logic_error;
};

[[noreturn]] inline void programming_error(std::string_view what,
                                           SourceLocation where = SourceLocation::current()) {
    throw ProgrammingError(fmt::format("{}:{}: {}", where.file_name(), where.line(), what));
}

inline void check(bool condition, std::string_view what, SourceLocation where = SourceLocation::current()) {
    if (!condition) programming_error(what, where);
}

}  // namespace llmc
