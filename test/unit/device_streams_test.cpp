// A step's list on a device's streams: which actions wait for which.
#include "llmc/parallel/step/device_streams.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "llmc/parallel/step/build_step.h"
#include "test/unit/fake_streams.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

bool touch_the_same(const Action& a, const Action& b) {
    const auto meet = [](const std::vector<BufferUse>& x, const std::vector<BufferUse>& y) {
        for (const BufferUse& use : x)
            for (const BufferUse& other : y)
                if (use.role == other.role && use.index == other.index) return true;
        return false;
    };
    return meet(a.writes, b.reads) || meet(a.writes, b.writes) || meet(a.reads, b.writes);
}

Step training_step(int ranks) { return build_training_step(whole_spec(3, {.shards = ranks}, 2)); }

// Runs the list twice. Returns the places of its actions in the streams, for both runs.
std::vector<std::vector<std::size_t>> places(FakeStreams& fake, const Step& step, bool overlap) {
    DeviceStreams streams(fake, overlap);
    std::vector<std::vector<std::size_t>> all;
    for (int run = 0; run < 2; ++run) {
        std::vector<std::size_t>& of_run = all.emplace_back();
        run_with(streams, step, [&](const Action&) { of_run.push_back(fake.work()); });
        EXPECT_EQ(fake.selected(), StreamKind::compute);
    }
    return all;
}

TEST(DeviceStreams, ActionsThatShareABufferWaitForEachOther) {
    for (const bool overlap : {true, false}) {
        FakeStreams fake;
        const Step step = training_step(2);
        const auto runs = places(fake, step, overlap);
        int dependent = 0, beside = 0;
        for (const auto& place : runs) {
            for (std::size_t i = 0; i < step.actions.size(); ++i) {
                for (std::size_t j = i + 1; j < step.actions.size(); ++j) {
                    const bool ordered = fake.is_before(place[i], place[j]);
                    if (touch_the_same(step.actions[i], step.actions[j])) {
                        EXPECT_TRUE(ordered) << i << " before " << j;
                        ++dependent;
                    } else if (!ordered) {
                        ++beside;
                    }
                }
            }
        }
        EXPECT_GT(dependent, 100);
        // With overlap, not all actions are in one order.
        EXPECT_EQ(beside > 0, overlap);
    }
}

TEST(DeviceStreams, AListBeginsWhenTheLastOneHasEnded) {
    FakeStreams fake;
    Step step;  // no action waits for another
    for (const StreamKind stream :
         {StreamKind::communication, StreamKind::compute, StreamKind::communication}) {
        step.actions.push_back(
            {.kind = ActionKind::gather_gradients, .stream = stream, .reads = {}, .writes = {}});
    }
    const auto runs = places(fake, step, true);
    for (const std::size_t earlier : runs[0])
        for (const std::size_t later : runs[1]) EXPECT_TRUE(fake.is_before(earlier, later));
    // The compute stream's next work comes after them too.
    const std::size_t next = fake.work();
    for (const std::size_t earlier : runs[1]) EXPECT_TRUE(fake.is_before(earlier, next));
}

TEST(DeviceStreams, CommunicationHasItsStreamWhereThereIsAnyAndOverlapIsAskedFor) {
    for (const auto& [ranks, overlap] : {std::pair{2, true}, {2, false}, {1, true}}) {
        FakeStreams fake;
        const Step step = training_step(ranks);
        const auto place = places(fake, step, overlap)[0];
        for (std::size_t i = 0; i < place.size(); ++i) {
            const StreamKind expected = overlap ? step.actions[i].stream : StreamKind::compute;
            EXPECT_EQ(fake.stream_of(place[i]), expected);
        }
    }
}

TEST(DeviceStreams, TimesAreThoseOfThePhases) {
    FakeStreams fake;
    const Step step = training_step(1);
    DeviceStreams streams(fake, true);
    run_with(streams, step, [&](const Action&) { fake.work(); });
    PhaseTimes expected;
    for (const Action& action : step.actions) expected[phase_of(action.kind)] += 1;
    const PhaseTimes times = streams.times();
    for (const Phase phase : all_phases) EXPECT_EQ(times[phase], expected[phase]) << name_of(phase);
}

// Each piece of work takes a millisecond of FakeStreams' single clock. An action begins and ends at the times
// of its turn.
TEST(DeviceStreams, EveryActionIsTimedWhereThatIsAskedFor) {
    for (const bool overlap : {true, false}) {
        FakeStreams fake;
        const Step step = training_step(2);
        DeviceStreams streams(fake, overlap);
        const auto work = [&](const Action&) { fake.work(); };
        run_with(streams, step, work);
        EXPECT_TRUE(streams.action_times().empty());
        EXPECT_EQ(fake.host_waits(), 0U);
        streams.watch_actions(true);
        run_with(streams, step, work);
        EXPECT_EQ(fake.host_waits(), 1U);
        const auto times = streams.action_times();
        ASSERT_EQ(times.size(), step.actions.size());
        // The clock's time since the system's start is large compared with the measured times.
        constexpr double rounding = 1e-6;
        for (std::size_t place = 0; place < times.size(); ++place) {
            EXPECT_NEAR(times[place].end - times[place].begin, 1e-3, rounding);
            EXPECT_NEAR(times[place].begin - times[0].begin, 1e-3 * static_cast<double>(place), rounding);
        }
        streams.watch_actions(false);
        run_with(streams, step, work);
        EXPECT_TRUE(streams.action_times().empty());
    }
}

}  // namespace
}  // namespace llmc
