// A list of actions with a planted fault, which check_step must find.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "llmc/core/error.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

inline void expect_found(Step faulty, const std::string& message) {
    order_streams(faulty);
    try {
        check_step(faulty);
        ADD_FAILURE() << "not found: " << message;
    } catch (const ProgrammingError& fault) {
        EXPECT_NE(std::string(fault.what()).find(message), std::string::npos) << fault.what();
    }
}

}  // namespace llmc
