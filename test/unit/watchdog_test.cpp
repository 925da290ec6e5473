// Who may say that a peer does not answer: at any moment one rank at most, with a pause to the next.

#include <gtest/gtest.h>

#include "llmc/comm/watchdog.h"

namespace llmc {
namespace {

TEST(TurnToSpeak, ComesToOneRankAtATimeWithPauses) {
    for (const int size : {1, 2, 3, 8, 16}) {
        int last = -1;
        double last_time = 0;
        std::vector<int> turns(static_cast<std::size_t>(size));
        // Ten seconds in steps of a poll, at a time of day such as clocks show.
        for (int tick = 0; tick < 100000; ++tick) {
            const double clock = 1.7e9 + tick * 1e-4;
            for (int rank = 0; rank < size; ++rank) {
                if (!is_turn_to_speak(rank, size, 0.0, clock)) continue;
                if (last >= 0 && last != rank) {
                    // Half a turn of 0.2 s, up to the clock's resolution at that time of day.
                    EXPECT_GT(clock - last_time, 0.0999);
                    ++turns[static_cast<std::size_t>(rank)];
                }
                last = rank;
                last_time = clock;
            }
        }
        // Each of at most 16 ranks comes at least every 3.2 s: three times in ten seconds, less the first.
        for (const int count : turns) EXPECT_GE(count, size > 1 ? 2 : 0) << size;
        EXPECT_GE(last, 0) << size;
    }
}

TEST(TurnToSpeak, RanksBeyondSixteenComeLater) {
    const auto speaks_within = [](int rank, double overdue) {
        for (double clock = 1000; clock < 1003.2; clock += 0.01)
            if (is_turn_to_speak(rank, 1000, overdue, clock)) return true;
        return false;
    };
    EXPECT_TRUE(speaks_within(15, 0.0));
    EXPECT_FALSE(speaks_within(16, 3.1));
    EXPECT_TRUE(speaks_within(16, 3.3));
    EXPECT_FALSE(speaks_within(999, 198.3));
    EXPECT_TRUE(speaks_within(999, 198.5));
}

}  // namespace
}  // namespace llmc
