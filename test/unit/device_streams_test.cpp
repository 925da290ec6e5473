// The list of a step on a device's queues: what waits for what.
#include "llmc/parallel/device_streams.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "llmc/parallel/build_step.h"
#include "test/unit/fake_queues.h"
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

// Runs the list twice; returns the places in the queues of its actions, of both runs.
std::vector<std::vector<std::size_t>> places(FakeQueues& queues, const Step& step, bool overlap) {
    DeviceStreams streams(queues, overlap);
    std::vector<std::vector<std::size_t>> all;
    for (int run = 0; run < 2; ++run) {
        std::vector<std::size_t>& of_run = all.emplace_back();
        run_with(streams, step, [&](const Action&) { of_run.push_back(queues.work()); });
        EXPECT_EQ(queues.selected(), StreamKind::compute);
    }
    return all;
}

TEST(DeviceStreams, ActionsThatShareABufferWaitForEachOther) {
    for (const bool overlap : {true, false}) {
        FakeQueues queues;
        const Step step = training_step(2);
        const auto runs = places(queues, step, overlap);
        int dependent = 0, beside = 0;
        for (const auto& place : runs) {
            for (std::size_t i = 0; i < step.actions.size(); ++i) {
                for (std::size_t j = i + 1; j < step.actions.size(); ++j) {
                    const bool ordered = queues.is_before(place[i], place[j]);
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
        // Overlap is that not all is in one order.
        EXPECT_EQ(beside > 0, overlap);
    }
}

TEST(DeviceStreams, AListBeginsWhenTheLastOneHasEnded) {
    FakeQueues queues;
    Step step;  // nothing in it waits for anything
    for (const StreamKind stream :
         {StreamKind::communication, StreamKind::compute, StreamKind::communication}) {
        step.actions.push_back(
            {.kind = ActionKind::gather_gradients, .stream = stream, .reads = {}, .writes = {}});
    }
    const auto runs = places(queues, step, true);
    for (const std::size_t earlier : runs[0])
        for (const std::size_t later : runs[1]) EXPECT_TRUE(queues.is_before(earlier, later));
    // And so does whatever the compute queue is given next.
    const std::size_t next = queues.work();
    for (const std::size_t earlier : runs[1]) EXPECT_TRUE(queues.is_before(earlier, next));
}

TEST(DeviceStreams, CommunicationHasItsQueueWhereThereIsAnyAndOverlapIsAskedFor) {
    for (const auto& [ranks, overlap] : {std::pair{2, true}, {2, false}, {1, true}}) {
        FakeQueues queues;
        const Step step = training_step(ranks);
        const auto place = places(queues, step, overlap)[0];
        for (std::size_t i = 0; i < place.size(); ++i) {
            const StreamKind expected = overlap ? step.actions[i].stream : StreamKind::compute;
            EXPECT_EQ(queues.stream_of(place[i]), expected);
        }
    }
}

TEST(DeviceStreams, TimesAreThoseOfThePhases) {
    FakeQueues queues;
    const Step step = training_step(1);
    DeviceStreams streams(queues, true);
    run_with(streams, step, [&](const Action&) { queues.work(); });
    PhaseTimes expected;
    for (const Action& action : step.actions) expected[phase_of(action.kind)] += 1;
    const PhaseTimes times = streams.times();
    for (const Phase phase : all_phases) EXPECT_EQ(times[phase], expected[phase]) << name_of(phase);
}

// Work takes a millisecond of FakeQueues' one clock: each action's time is that between the numbers of its turn.
TEST(DeviceStreams, EveryActionIsTimedWhereThatIsAskedFor) {
    for (const bool overlap : {true, false}) {
        FakeQueues queues;
        const Step step = training_step(2);
        DeviceStreams streams(queues, overlap);
        const auto work = [&](const Action&) { queues.work(); };
        run_with(streams, step, work);
        EXPECT_TRUE(streams.action_times().empty());
        EXPECT_EQ(queues.host_waits(), 0U);
        streams.watch_actions(true);
        run_with(streams, step, work);
        EXPECT_EQ(queues.host_waits(), 1U);
        const auto times = streams.action_times();
        ASSERT_EQ(times.size(), step.actions.size());
        // The clock's time since the system began is large against what is measured.
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
