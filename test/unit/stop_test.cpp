// How a process handles the signals that ask it to stop. test_signals.py tests whole runs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "llmc/train/stop.h"

namespace llmc {
namespace {

void pause_for(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

TEST(StopSignals, TheFirstIsNoted) {
    const StopSignals signals;
    EXPECT_FALSE(signals.here());
    raise(SIGUSR1);
    EXPECT_TRUE(signals.here());
}

TEST(StopSignals, OneRequestMayArriveSeveralTimes) {
    const StopSignals signals;
    for (int i = 0; i < 3; ++i) raise(SIGUSR1);  // the default action would end this test
    EXPECT_TRUE(signals.here());
}

TEST(StopSignals, ASecondOneEndsTheProcess) {
    EXPECT_EXIT(
        {
            std::signal(SIGINT, SIG_DFL);  // a shell starts background processes with it ignored
            const StopSignals signals;
            raise(SIGINT);
            pause_for(150);
            raise(SIGINT);
        },
        testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, WhatWasIgnoredStaysIgnored) {
    std::signal(SIGINT, SIG_IGN);
    {
        const StopSignals signals;
        raise(SIGINT);
        EXPECT_FALSE(signals.here());
    }
    raise(SIGINT);
    std::signal(SIGINT, SIG_DFL);
}

TEST(StopSignals, AfterwardsTheSystemDecides) {
    { const StopSignals signals; }
    EXPECT_EXIT(raise(SIGUSR1), testing::KilledBySignal(SIGUSR1), "");
}

}  // namespace
}  // namespace llmc
