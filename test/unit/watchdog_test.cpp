// Which rank may report that a peer does not answer: at most one rank at any moment, with a pause before the
// next. Also the messages of a rank about its waits, and when it ends the job.

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "llmc/comm/watchdog.h"

namespace llmc {
namespace {

TEST(TurnToReport, ComesToOneRankAtATimeWithPauses) {
    for (const int size : {1, 2, 3, 8, 16}) {
        int last = -1;
        double last_time = 0;
        std::vector<int> turns(static_cast<std::size_t>(size));
        // Ten seconds in steps of one poll, at a realistic time of day.
        for (int tick = 0; tick < 100000; ++tick) {
            const double clock = 1.7e9 + tick * 1e-4;
            for (int rank = 0; rank < size; ++rank) {
                if (!is_turn_to_report(rank, size, 0.0, clock)) continue;
                if (last >= 0 && last != rank) {
                    // Half a turn of 0.2 s, up to the clock's resolution at that time of day.
                    EXPECT_GT(clock - last_time, 0.0999);
                    ++turns[static_cast<std::size_t>(rank)];
                }
                last = rank;
                last_time = clock;
            }
        }
        // Each of at most 16 ranks has a turn at least every 3.2 s: three turns in ten seconds, minus the
        // first.
        for (const int count : turns) EXPECT_GE(count, size > 1 ? 2 : 0) << size;
        EXPECT_GE(last, 0) << size;
    }
}

TEST(TurnToReport, RanksBeyondSixteenComeLater) {
    const auto reports_within = [](int rank, double overdue) {
        for (int hundredths = 0; hundredths < 320; ++hundredths)
            if (is_turn_to_report(rank, 1000, overdue, 1000 + hundredths / 100.0)) return true;
        return false;
    };
    EXPECT_TRUE(reports_within(15, 0.0));
    EXPECT_FALSE(reports_within(16, 3.1));
    EXPECT_TRUE(reports_within(16, 3.3));
    EXPECT_FALSE(reports_within(999, 3.1));
    EXPECT_TRUE(reports_within(999, 3.3));
}

TEST(TurnToReport, OthersHaveHadTheirsInBoundedTime) {
    const auto last_turn = [](int rank, int size) {
        double overdue = 0;
        while (!is_turn_to_report(rank, size, overdue, 1000.15 + overdue)) overdue += 0.01;
        return overdue;
    };
    for (const int size : {2, 4, 16, 40, 1024}) {
        for (int rank = 0; rank < size; ++rank)
            EXPECT_LE(last_turn(rank, size), time_for_others(size, 0)) << rank << " of " << size;
    }
    // A rank may begin to wait half of the limit later.
    EXPECT_GE(time_for_others(4, 3), 1.5);
    EXPECT_LE(time_for_others(1024, 1e6), 12);
    EXPECT_LE(time_for_others(1024, 1), 7);
}

// A transport between two ranks. It records what this rank tells the other, and answers with preset values.
class FakeTransport final : public Transport {
  public:
    int rank() const override { return 0; }
    int size() const override { return 2; }
    int largest_tag() const override { return 0; }
    std::unique_ptr<Messages> messages() override { return nullptr; }
    void tell_waiting(bool waits) override { told.push_back(waits); }
    bool is_waiting(int) override { return other_waits; }
    void hear() override { ++hearings; }
    void finish() override {}
    void end(int) override {}
    bool reports_failure(std::span<const int>) override { return true; }
    void end_if_lost() override {}
    void abort() override { throw Aborted(); }
    void give_way() override {}

    struct Aborted {};
    std::vector<bool> told;
    bool other_waits = false;
    int hearings = 0;
};

class Watching : public testing::Test {
  protected:
    // Looks every 5 ms of the test's own time until the job ends, which leaves its message, or until `seconds`
    // have passed.
    std::string look_for(double seconds, bool moved = false) {
        const Seconds end = time + Seconds(seconds);
        testing::internal::CaptureStderr();
        try {
            do {
                time += Seconds(0.005);
                watchdog.look(moved, [] { return std::vector{1}; });
            } while (time < end);
        } catch (const FakeTransport::Aborted&) {
        }
        return testing::internal::GetCapturedStderr();
    }
    static Moment own_moment() {
        using Clock = std::chrono::steady_clock;
        return {Clock::time_point(std::chrono::duration_cast<Clock::duration>(time)), time};
    }

    inline static Seconds time{1000};  // goes on from test to test, as clocks do
    FakeTransport transport;
    Seconds limit{0.6};
    Watchdog watchdog{transport, limit, own_moment};
};

TEST_F(Watching, ALongWaitIsToldOnceAndTakenBackWhenItIsOver) {
    watchdog.begin("a call");
    EXPECT_EQ(look_for(0.05), "");
    watchdog.end();
    EXPECT_EQ(transport.told, std::vector<bool>());
    watchdog.begin("a call");
    EXPECT_EQ(look_for(0.45), "");
    EXPECT_EQ(transport.told, std::vector<bool>({true}));
    watchdog.end();
    watchdog.end();
    EXPECT_EQ(transport.told, std::vector<bool>({true, false}));
    EXPECT_EQ(transport.hearings, 1);
}

TEST_F(Watching, ALongWaitIsTakenBackWhenSomethingMoves) {
    watchdog.begin("a call");
    EXPECT_EQ(look_for(0.45), "");
    EXPECT_EQ(look_for(0.01, true), "");
    EXPECT_EQ(transport.told, std::vector<bool>({true, false}));
    EXPECT_EQ(look_for(0.45), "");
    EXPECT_EQ(transport.told, std::vector<bool>({true, false, true}));
    // A wait that did not end.
    watchdog.begin("another call");
    EXPECT_EQ(transport.told, std::vector<bool>({true, false, true, false}));
}

TEST_F(Watching, MovementHoldsTheEndOff) {
    watchdog.begin("a call");
    EXPECT_EQ(look_for(1.5, true), "");
}

TEST_F(Watching, TheLineNamesWhatMayBeTheReason) {
    watchdog.begin("a call", "try another");
    EXPECT_EQ(look_for(5),
              "error: rank 0 waited 0.6 s in a call for rank 1, which does not answer; the job ends; try "
              "another\n");
}

TEST_F(Watching, WhoWaitsTooIsNamedLateAndNotForEver) {
    transport.other_waits = true;
    watchdog.begin("a call");
    const Seconds begin = time;
    EXPECT_EQ(look_for(5),
              "error: rank 0 waited 0.6 s in a call for rank 1, which waits too; the job ends\n");
    EXPECT_GE(time - begin, Seconds(0.6 + time_for_others(2, 0.6)));
}

}  // namespace
}  // namespace llmc
