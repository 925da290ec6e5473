// For tests of what the program refuses as a mistake of its own: the message of a ProgrammingError.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>

#include "llmc/core/error.h"

namespace llmc {

inline std::string fault_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const ProgrammingError& fault) {
        return fault.what();
    }
    return "no fault";
}

inline void expect_fault(const std::function<void()>& f, std::string_view what) {
    const std::string fault = fault_of(f);
    EXPECT_NE(fault.find(what), std::string::npos) << fault;
}

}  // namespace llmc
